"""Tables as values, their HTML, Markdown and LaTeX, and what readers call variants and scalings."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
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
CONTESTANTS = {"rotated for SDPA": "keys made for SDPA", "cudnn": "cuDNN"}
NOTHING = "—"


def variant_name(variant: str) -> str:
    """Return what readers call a variant.

    >>> variant_name("coca-exact"), variant_name("hybrid-pope"), variant_name("mine")
    ('CoCA exact', 'Hybrid PoPE', 'mine')
    """
    base, bracket, rest = variant.partition(" (")
    hybrid = base.startswith("hybrid")
    base = base.removeprefix("hybrid").removeprefix("-")
    return f"{'Hybrid ' * hybrid}{STYLES[base][0] if base in STYLES else base}".strip() + bracket + rest


def contestant_name(contestant: str) -> str:
    """
    >>> contestant_name("coca-exact, cudnn"), contestant_name("coca-exact, rotated cache")
    ('CoCA exact, cuDNN', 'CoCA exact, rotated cache')
    """
    return ", ".join(CONTESTANTS.get(part, variant_name(part)) for part in contestant.split(", "))


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


@dataclass(frozen=True)
class Cell:
    """A number, and its spread in small print."""

    text: str = NOTHING
    note: str = ""


@dataclass(frozen=True)
class Line:
    """One line; lines with the same label, ours and the paper's, form a group."""

    label: str
    source: str
    cells: tuple[Cell, ...]
    counts: str = ""


@dataclass(frozen=True)
class Table:
    """A titled table with a heading for each column of cells."""

    name: str
    title: str
    caption: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    heading: str = "Method"
    beside: str = ""
    """Heading of the sources."""

    @property
    def sourced(self) -> bool:
        """Whether lines have sources."""
        return any(line.source for line in self.lines)


def grid(
    name: str,
    title: str,
    columns: Iterable[str],
    entries: Iterable[tuple[str, str, Sequence[Estimate | None]]],
    *,
    caption: str = "",
    heading: str = "Variant",
    show: Callable[[float], str] | None = None,
) -> Table | None:
    """Make a table of estimates from (label, source, estimates); return None if it has no number."""
    lines = tuple(
        Line(label, source, tuple(estimate_cell(estimate, show) for estimate in found), counts_text(found))
        for label, source, found in entries
        if any(found)
    )
    return Table(name, title, caption, tuple(columns), lines, heading) if lines else None


def listing(
    name: str, title: str, columns: Iterable[str], rows: Iterable[Sequence[str]], *, caption: str = "", heading: str
) -> Table | None:
    """Make a table of texts from rows (label, source, text, …); return None if there are none."""
    lines = tuple(Line(label, source, tuple(map(Cell, texts))) for label, source, *texts in rows)
    return Table(name, title, caption, tuple(columns), lines, heading) if lines else None


def pivot(
    name: str,
    title: str,
    entries: Iterable[tuple[str, str, tuple[Any, ...], str, Cell]],
    heading: str,
    beside: str = "",
) -> Table | None:
    """Make a table from (label, source, order of the column, its heading, cell); lines keep their first order."""
    cells: dict[tuple[str, str], dict[str, Cell]] = {}
    columns: dict[str, tuple[Any, ...]] = {}
    for label, source, order, column, cell in entries:
        cells.setdefault((label, source), {})[column] = cell
        columns[column] = order
    heads, labels = (
        sorted(columns, key=lambda column: columns[column]),
        list(dict.fromkeys(label for label, _ in cells)),
    )
    lines = [Line(*key, tuple(cells[key].get(head, Cell()) for head in heads)) for key in cells]
    lines.sort(key=lambda line: labels.index(line.label))
    return Table(name, title, "", tuple(heads), tuple(lines), heading, beside) if lines else None


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


def amount(number: float) -> str:
    """
    >>> amount(33_400_000), amount(1500), amount(12)
    ('33.4M', '1.5k', '12')
    """
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:g}"


def estimate_cell(estimate: Estimate | None, show: Callable[[float], str] | None = None) -> Cell:
    """Show the mean; in small print a share's 95% interval, and the range over several seeds.

    >>> estimate_cell(Estimate(20.5, 20.0, 21.0, 2))
    Cell(text='20.50', note='20.00–21.00')
    """
    if estimate is None:
        return Cell()
    show = show or (share_text if estimate.interval else perplexity_text)
    seeds = "–".join(map(show, (estimate.low, estimate.high))) if estimate.seeds > 1 else ""
    if estimate.interval is None:
        return Cell(show(estimate.value), seeds)
    note = "95% " + "–".join(map(show, estimate.interval))
    return Cell(show(estimate.value), f"{note}; seeds {seeds}" if seeds else note)


def counts_text(estimates: Iterable[Estimate | None]) -> str:
    """Say what a line's numbers were counted over.

    >>> counts_text([Estimate(0.5, 0.5, 0.5, 1, (0.2, 0.8), cases=10), None])
    '1 seed, 10 cases'
    """
    found, parts = [estimate for estimate in estimates if estimate], []
    for name in ("seeds", "cases", "texts", "tokens"):
        values = sorted({getattr(estimate, name) for estimate in found} - {0})
        if values:
            parts.append("–".join(f"{v:,}" for v in dict.fromkeys((values[0], values[-1]))))
            parts[-1] += f" {name[:-1] if values == [1] else name}"
    return ", ".join(parts)


def to_html(table: Table) -> str:
    """Return the table element, with every text escaped."""
    heads = [table.heading, *([table.beside] if table.sourced else []), *table.columns]
    out = ["<table>", "<thead><tr>"]
    for i, text in enumerate(heads):
        source = ' class="source"' if table.sourced and i == 1 else ""
        out.append(f'<th scope="col"{source}>{escape(text).replace("(paper ", "(paper&nbsp;")}</th>')
    out.append("</tr></thead>")
    for label, group in groupby(table.lines, key=lambda line: line.label):
        lines = list(group)
        out.append("<tbody>")
        for i, line in enumerate(lines):
            out.append(f'<tr class="{"paper" if line.source.startswith("paper") else "ours"}">')
            out += [f'<th scope="rowgroup" rowspan="{len(lines)}">{escape(label)}</th>'] if i == 0 else []
            if table.sourced:
                out.append(f'<td class="source">{escape(line.source)}{_small(line.counts)}</td>')
            out += [f"<td>{escape(cell.text)}{_small(*cell.note.split('; '))}</td>" for cell in line.cells]
            out.append("</tr>")
        out.append("</tbody>")
    return "\n".join([*out, "</table>"])


def _small(*notes: str) -> str:
    return "".join(f"<small>{escape(note)}</small>" for note in notes if note)


def to_markdown(table: Table) -> str:
    """Return a Markdown table with its title above and its caption below."""
    sources = [table.beside or "source"] if table.sourced else []
    rows = [[table.heading, *sources, *table.columns]]
    rows.append(["---"] * (1 + len(sources)) + ["---:"] * len(table.columns))
    for line in table.lines:
        cells = [_noted(cell.text, cell.note) for cell in line.cells]
        rows.append([line.label, *([_noted(line.source, line.counts)] if sources else []), *cells])
    body = "\n".join("| " + " | ".join(map(markdown_text, row)) + " |" for row in rows)
    return f"### {markdown_text(table.title)}\n\n{body}\n\n{markdown_text(table.caption)}\n"


def _noted(text: str, note: str) -> str:
    return f"{text} ({note})" if note else text


def markdown_text(text: str) -> str:
    r"""Escape plain text, HTML in it too.

    >>> print(markdown_text("a_b <script>"))
    a\_b &lt;script&gt;
    """
    return re.sub(r"([\\|*_`\[\]])", r"\\\1", " ".join(escape(text, quote=False).split()))


LATEX = {
    "\\": r"\textbackslash{}",
    **{c: "\\" + c for c in "&%$#_{}"},
    **{c: f"{{{c}}}" for c in "[]"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{"—": "---", "–": "--", "×": r"$\times$", "≤": r"$\le$", ">": r"$>$", "<": r"$<$", "…": r"\dots{}"},
}


def latex_text(text: str) -> str:
    r"""Escape plain text.

    >>> print(latex_text("RoFormer & CoCA, 95%"))
    RoFormer \& CoCA, 95\%
    """
    return "".join(LATEX.get(c, c) for c in " ".join(text.split()))


def to_latex(table: Table) -> str:
    """Return a booktabs table (``\\usepackage{booktabs}``)."""
    head = [table.heading, *([table.beside] if table.sourced else []), *table.columns]
    out = [
        "\\begin{table}\n\\centering",
        rf"\caption{{{latex_text(table.title)}. {latex_text(table.caption)}}}",
        rf"\label{{tab:{table.name}}}",
        rf"\begin{{tabular}}{{{'l' * (1 + table.sourced)}{'r' * len(table.columns)}}}",
        r"\toprule",
        " & ".join(map(latex_text, head)) + r" \\",
        r"\midrule",
    ]
    for label, group in groupby(table.lines, key=lambda line: line.label):
        for i, line in enumerate(group):
            cells = [
                Cell(label if i == 0 else ""),
                *([Cell(line.source, line.counts)] if table.sourced else []),
                *line.cells,
            ]
            out.append(" & ".join(map(_latex, cells)) + r" \\")
    return "\n".join([*out, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def _latex(cell: Cell) -> str:
    return latex_text(cell.text) + (rf" {{\scriptsize ({latex_text(cell.note)})}}" if cell.note else "")
