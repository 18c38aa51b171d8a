"""A table as a value, and its three spellings: HTML, Markdown, LaTeX (booktabs)."""

import math
from dataclasses import dataclass
from html import escape
from itertools import groupby

from farspan.report.estimates import Estimate

NOTHING = "—"


@dataclass(frozen=True)
class Cell:
    """What stands in a table: a number, and its spread in small print."""

    text: str = NOTHING
    note: str = ""


@dataclass(frozen=True)
class Line:
    """One line: the lines with one label, ours and the paper's, stand together."""

    label: str
    source: str
    cells: tuple[Cell, ...]
    counts: str = ""


@dataclass(frozen=True)
class Table:
    """A titled table with one heading for each column of numbers."""

    name: str
    title: str
    caption: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    heading: str = "Method"
    beside: str = ""
    """The heading of what lines have beside their label, where it is not whose numbers they are."""

    @property
    def sourced(self) -> bool:
        """Whether lines say whose numbers they are."""
        return any(line.source for line in self.lines)


def perplexity_text(value: float | str) -> str:
    """A perplexity as the paper prints it.

    >>> [perplexity_text(x) for x in (19.66, 3276.0, 2.5e7, float("inf"), "OOM")]
    ['19.66', '3,276', '2.5e+07', 'inf', 'OOM']
    """
    if isinstance(value, str) or not math.isfinite(value):
        return str(value)
    if value >= 1e6:
        return f"{value:.1e}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def share_text(value: float | str, digits: int = 2) -> str:
    """An accuracy between 0 and 1."""
    return value if isinstance(value, str) else f"{value:.{digits}f}"


def estimate_cell(estimate: Estimate | None, digits: int = 2) -> Cell:
    """Mean; below it the 95% interval of a share, and the range over seeds where there are several.

    `digits` are those of a share.

    >>> estimate_cell(Estimate(20.5, 20.0, 21.0, 2))
    Cell(text='20.50', note='20.00–21.00')
    """
    if estimate is None:
        return Cell()
    several = estimate.seeds > 1
    if estimate.interval is None:
        ends = (f"{end:,.0f}" if 100 <= end < 1e6 else perplexity_text(end) for end in (estimate.low, estimate.high))
        return Cell(perplexity_text(estimate.value), "–".join(ends) if several else "")
    low, high = (share_text(end, digits) for end in estimate.interval)
    seeds = f"; seeds {share_text(estimate.low, digits)}–{share_text(estimate.high, digits)}" if several else ""
    return Cell(share_text(estimate.value, digits), f"95% {low}–{high}{seeds}")


def counts_text(estimates: list[Estimate | None]) -> str:
    """What a line's numbers were counted over, as ranges where it differs between columns.

    >>> counts_text([Estimate(0.5, 0.5, 0.5, 1, (0.2, 0.8), cases=10), None])
    '1 seed, 10 cases'
    """
    found = [estimate for estimate in estimates if estimate]
    parts = []
    for name in ("seeds", "cases", "texts", "tokens"):
        values = sorted({getattr(estimate, name) for estimate in found} - {0})
        if values:
            amount = f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,}–{values[-1]:,}"
            parts.append(f"{amount} {name[:-1] if values == [1] else name}")
    return ", ".join(parts)


def to_html(table: Table) -> str:
    """The table element alone; every text is escaped."""
    beside = [f'<th scope="col" class="source">{escape(table.beside)}</th>'] if table.sourced else []
    head = [_html_head(table.heading), *beside, *map(_html_head, table.columns)]
    out = ["<table>", "<thead><tr>", *head, "</tr></thead>"]
    for label, group in groupby(table.lines, key=lambda line: line.label):
        lines = list(group)
        out.append("<tbody>")
        for i, line in enumerate(lines):
            out.append(f'<tr class="{"paper" if line.source.startswith("paper") else "ours"}">')
            if i == 0:
                out.append(f'<th scope="rowgroup" rowspan="{len(lines)}">{escape(label)}</th>')
            if table.sourced:
                counts = f"<small>{escape(line.counts)}</small>" if line.counts else ""
                out.append(f'<td class="source">{escape(line.source)}{counts}</td>')
            out += [_html_cell(cell) for cell in line.cells]
            out.append("</tr>")
        out.append("</tbody>")
    return "\n".join([*out, "</table>"])


def _html_head(text: str) -> str:
    return f'<th scope="col">{escape(text).replace("(paper ", "(paper&nbsp;")}</th>'


def _html_cell(cell: Cell) -> str:
    notes = "".join(f"<small>{escape(note)}</small>" for note in cell.note.split("; ") if note)
    return f"<td>{escape(cell.text)}{notes}</td>"


def to_markdown(table: Table) -> str:
    """A Markdown table with its title above and its caption below."""
    rows = [[table.heading, *([table.beside or "source"] if table.sourced else []), *table.columns]]
    rows.append(["---"] * (len(rows[0]) - len(table.columns)) + ["---:"] * len(table.columns))
    rows += _flat(table)
    body = "\n".join("| " + " | ".join(_markdown(text) for text in row) + " |" for row in rows)
    return f"### {_markdown(table.title)}\n\n{body}\n\n{_markdown(table.caption)}\n"


def _flat(table: Table) -> list[list[str]]:
    """Rows of plain texts: notes and counts in brackets."""
    rows = []
    for line in table.lines:
        source = f"{line.source} ({line.counts})" if line.counts else line.source
        cells = [f"{cell.text} ({cell.note})" if cell.note else cell.text for cell in line.cells]
        rows.append([line.label, *([source] if table.sourced else []), *cells])
    return rows


def _markdown(text: str) -> str:
    for special in "\\|*_`<":
        text = text.replace(special, "\\" + special)
    return text.replace("\n", " ")


LATEX = {
    "\\": r"\textbackslash{}",
    **{c: "\\" + c for c in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "—": "---",
    "–": "--",
    "×": r"$\times$",
    "≤": r"$\le$",
    ">": r"$>$",
    "<": r"$<$",
    "…": r"\dots{}",
}


def latex_text(text: str) -> str:
    r"""Plain text as LaTeX prints it.

    >>> print(latex_text("RoFormer & CoCA, 95%"))
    RoFormer \& CoCA, 95\%
    """
    return "".join(LATEX.get(c, c) for c in text)


def to_latex(table: Table) -> str:
    """A booktabs table (``\\usepackage{booktabs}``) with small print in a second size."""
    texts = len(table.columns)
    left = "ll" if table.sourced else "l"
    head = [table.heading, *([table.beside] if table.sourced else []), *table.columns]
    out = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{latex_text(table.title)}. {latex_text(table.caption)}}}",
        rf"\label{{tab:{table.name}}}",
        rf"\begin{{tabular}}{{{left}{'r' * texts}}}",
        r"\toprule",
        " & ".join(latex_text(text) for text in head) + r" \\",
        r"\midrule",
    ]
    for label, group in groupby(table.lines, key=lambda line: line.label):
        for i, line in enumerate(group):
            first = [latex_text(label) if i == 0 else ""]
            source = [_latex(Cell(line.source, line.counts))] if table.sourced else []
            out.append(" & ".join([*first, *source, *(_latex(cell) for cell in line.cells)]) + r" \\")
    return "\n".join([*out, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def _latex(cell: Cell) -> str:
    return latex_text(cell.text) + (rf" {{\scriptsize ({latex_text(cell.note)})}}" if cell.note else "")
