"""Tables of strings, their Markdown, and what readers call variants and scalings."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any
from zlib import crc32

from farspan.report.results import Estimate

# Colours of Okabe and Ito, told apart with every common colour vision, on light and dark; markers repeat the meaning.
STYLES = {
    "alibi": ("ALiBi", "#8a8a8a", "s"),
    "rope": ("RoPE", "#D55E00", "o"),
    "coca-slack": ("CoCA slack", "#E69F00", "^"),
    "coca-strict": ("CoCA strict", "#009E73", "D"),
    "coca-exact": ("CoCA exact", "#0081c9", "v"),
    "coca-polar": ("CoCA polar", "#6A3D9A", ">"),
    "pope": ("PoPE", "#B15928", "<"),
    "cosformer": ("cosFormer", "#0072B2", "*"),
    "cosformer-plain": ("cosFormer without re-weighting", "#56B4E9", "X"),
    "linear-coca": ("Linear CoCA (experimental)", "#CC79A7", "p"),
}
OTHERS = (("#CC79A7", "P"), ("#6A3D9A", "h"), ("#B15928", "d"), ("#56B4E9", "X"))
SCALINGS = {
    "none": ("no scaling", "#1f2328", "o"),
    "linear": ("PI", "#E69F00", "s"),
    "ntk": ("NTK", "#0081c9", "^"),
    "dynamic_ntk": ("dynamic NTK", "#009E73", "D"),
    "yarn": ("YaRN", "#CC79A7", "v"),
    "llama3": ("Llama 3", "#8a8a8a", "*"),
}
NOTHING = "—"


def variant_name(variant: str) -> str:
    """Return what readers call a variant.

    >>> variant_name("coca-exact"), variant_name("hybrid-pope"), variant_name("mine")
    ('CoCA exact', 'Hybrid PoPE', 'mine')
    """
    base, bracket, rest = variant.partition(" (")
    kind = base.removeprefix("hybrid").removeprefix("-")
    name = STYLES[kind][0] if kind in STYLES else kind
    return (f"Hybrid {name}".strip() if base.startswith("hybrid") else name) + bracket + rest


def variant_style(variant: str) -> dict[str, Any]:
    """Return colour and marker of a variant, as matplotlib takes them; a hybrid is dashed in its kind's colour."""
    base = variant.partition(" (")[0].removeprefix("hybrid-")
    colour, marker = STYLES[base][1:] if base in STYLES else OTHERS[crc32(variant.encode()) % len(OTHERS)]
    return {"color": colour, "marker": marker} | ({"linestyle": "--"} if variant.startswith("hybrid") else {})


def variant_order(name: str) -> tuple[int, str]:
    """Return the sort key of a variant: that of the papers' tables."""
    return (list(STYLES).index(name) if name in STYLES else len(STYLES), name)


def scaling_name(scaling: str) -> str:
    """Return what readers call a scaling.

    >>> scaling_name("none"), scaling_name("dynamic_ntk-4/per_request"), scaling_name("yarn-4+log")
    ('no scaling', 'dynamic NTK 4 per request', 'YaRN 4, log length')
    """
    scaling, _, log = scaling.partition("+")
    method, _, mode = scaling.partition("/")
    kind, _, factor = method.rpartition("-")
    name = "no scaling" if method == "none" else f"{SCALINGS[kind][0]} {factor}" if kind in SCALINGS else method
    return name + (f" {mode.replace('_', ' ')}" if mode else "") + (", log length" if log else "")


def file_of(*parts: str) -> str:
    """Return a name that is safe as a file and as an HTML id.

    >>> file_of("depth", "my model", "ntk-4/per_request")
    'depth-my-model-ntk-4-per_request'
    """
    return re.sub(r"[^\w.-]+", "-", "-".join(filter(None, parts)))[:150]


# Numbers


def perplexity_text(value: float | str) -> str:
    """Format a perplexity as the paper does.

    >>> [perplexity_text(x) for x in (19.66, 3276.0, 2.5e7, float("inf"), "OOM")]
    ['19.66', '3,276', '2.5e+07', 'inf', 'OOM']
    """
    if isinstance(value, str) or not math.isfinite(value):
        return str(value)
    return f"{value:.1e}" if value >= 1e6 else f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def share_text(value: float | str, digits: int = 2) -> str:
    """Format an accuracy between 0 and 1."""
    return value if isinstance(value, str) else f"{value:.{digits}f}"


def noted(text: str, *notes: str) -> str:
    """Put small print below a text, a line for each note that is not empty."""
    return "\n".join([text, *filter(None, notes)])


Value = Estimate | str | None


def cell(value: Value, show: Callable[[float], str] | None = None) -> str:
    """Show a mean; in small print a share's 95% interval, and the range over several seeds.

    >>> print(cell(Estimate(20.5, 20.0, 21.0, 2)))
    20.50
    20.00–21.00
    """
    if not isinstance(value, Estimate):
        return value or NOTHING
    show = show or (share_text if value.interval else perplexity_text)
    interval = "95% " + "–".join(map(show, value.interval)) if value.interval else ""
    seeds = f"{show(value.low)}–{show(value.high)}" if value.seeds > 1 else ""
    return noted(show(value.value), interval, f"seeds {seeds}" if interval and seeds else seeds)


def counts_text(values: Iterable[Value]) -> str:
    """Say what a line's numbers were counted over.

    >>> counts_text([Estimate(0.5, 0.5, 0.5, 1, (0.2, 0.8), cases=10), None])
    '1 seed, 10 cases'
    """
    found, parts = [value for value in values if isinstance(value, Estimate)], []
    for name in ("seeds", "cases", "texts", "tokens"):
        counts = sorted({getattr(estimate, name) for estimate in found} - {0})
        if counts:
            parts.append("–".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1]))))
            parts[-1] += f" {name[:-1] if counts == [1] else name}"
    return ", ".join(parts)


# Tables


@dataclass(frozen=True)
class Table:
    """A titled table. A line has a label, a source that may be empty, and a cell for each column.

    Of each text, what follows the first line break is small print. Lines with the same label form a group.
    """

    name: str
    title: str
    caption: str
    columns: tuple[str, ...]
    lines: list[tuple[str, ...]]
    heading: str = "Method"

    @property
    def sourced(self) -> bool:
        """Whether lines have sources."""
        return any(line[1] for line in self.lines)

    @property
    def groups(self) -> list[tuple[str, list[tuple[str, ...]]]]:
        """The lines by label."""
        return [(label, list(lines)) for label, lines in groupby(self.lines, key=lambda line: line[0])]


def grid(
    name: str,
    title: str,
    columns: Iterable[str],
    entries: Iterable[tuple[str, str, Sequence[Value]]],
    *,
    caption: str = "",
    heading: str = "Variant",
    show: Callable[[float], str] | None = None,
) -> Table | None:
    """Make a table from (label, source, values); leave out lines without a value, and return None without a line."""
    lines = [
        (label, source and noted(source, counts_text(values)), *(cell(value, show) for value in values))
        for label, source, values in entries
        if any(values)
    ]
    return Table(name, title, caption, tuple(columns), lines, heading) if lines else None


def listing(
    name: str, title: str, columns: str, rows: Iterable[tuple[str, str, Mapping[str, Any]]], **more: Any
) -> Table | None:
    """Make a table from (label, source, row).

    Columns are headings with the formats of their numbers, such as "steps {steps:,}; minutes {minutes:.1f}". What a
    row does not have, or has as None, is shown as "—".
    """

    def filled(text: str, row: Mapping[str, Any]) -> str:
        try:
            return text.format_map(row)
        except (KeyError, AttributeError, TypeError):  # None has no value, and no format
            return NOTHING

    specs = [(f"{{{text}", head) for head, _, text in (column.partition(" {") for column in columns.split("; "))]
    entries = [(label, source, [filled(text, row) for text, _ in specs]) for label, source, row in rows]
    return grid(name, title, [head for _, head in specs], entries, **more)


# Markdown


def markdown_text(text: str) -> str:
    r"""Escape plain text, HTML in it too.

    >>> print(markdown_text("a_b <script>"))
    a\_b &lt;script&gt;
    """
    return re.sub(r"([\\|*_`\[\]])", r"\\\1", " ".join(escape(text, quote=False).split()))


def _with_notes(text: str) -> str:
    first, *notes = text.split("\n")
    return markdown_text(first) + (f" ({markdown_text('; '.join(notes))})" if notes else "")


def to_markdown(table: Table) -> str:
    """Return a Markdown table with its title above and its caption below; small print is in brackets."""
    sourced = table.sourced
    rows = [[markdown_text(head) for head in (table.heading, *["source"] * sourced, *table.columns)]]
    rows.append(["---"] * (1 + sourced) + ["---:"] * len(table.columns))
    rows += [
        [_with_notes(text) for text in (label, *[source] * sourced, *cells)] for label, source, *cells in table.lines
    ]
    body = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"### {markdown_text(table.title)}\n\n{body}\n\n{markdown_text(table.caption)}\n"
