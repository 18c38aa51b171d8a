"""CoCA's model at inference → tables of speeds over RoPE's, and what they say."""

from collections.abc import Sequence

from farspan.report.inference import BEST, Inferred
from farspan.report.names import contestant_name
from farspan.report.tables import Cell, Line, Table

DECODING = "Decoding and reading: CoCA beside RoPE"
SPEEDS = "Speeds are multiples of RoPE's in the same run: above 1 CoCA is faster."
CAPTIONS = {
    "coca-decode": """
        Decoding is greedy, after a context of random numbers; "eager" has a growing cache and plain calls, "graph" a
        static cache and a CUDA graph, "compiled" is compiled. Of a static cache RoPE on SDPA reads every slot with a
        mask, while CoCA's kernel stops where the text ends; so the first line gives each model its own fastest mode.
        CoCA's cache has 0.75 of RoPE's bytes; a "rotated cache", which earlier versions had, as many. Small print: the
        range that holds three fifths.""",
    "coca-prompt": """
        A prompt is read in chunks, one text. The paper (Table 6, Figure 6) states about 60 GB at 32k.""",
}
DECODING_TEXT = " ".join([SPEEDS, *CAPTIONS.values()])
PAPER_GIGABYTES = {32_768: "about 60"}
"""Table 6 and Figure 6 of the paper."""
MODES = {BEST: "each in its fastest mode"}
SPEED, PEAK = "speed over RoPE's", "peak, GB"


def decoding_tables(found: Sequence[Inferred]) -> list[Table]:
    """Of decoding and of reading a prompt: those that were measured."""
    made = [_models(found), _prompts(found)]
    return [table for table in made if table is not None]


def _models(found: Sequence[Inferred]) -> Table | None:
    rows = [x for x in found if x.what == "decode" and (x.attention != "rope" or x.mode == BEST)]
    modes = dict.fromkeys([BEST, *(x.mode for x in rows)])
    lines = []
    for attention in dict.fromkeys(x.attention for x in found if x.what == "decode"):
        for mode in modes:
            mine = [x for x in rows if (x.attention, x.mode) == (attention, mode)]
            if mine:
                lines.append(Line(contestant_name(attention), MODES.get(mode, mode), _cells(mine, rows)))
    title = "The whole model decoding: tokens a second over RoPE's"
    return _table("coca-decode", title, "Texts × tokens before", rows, lines)


def _prompts(found: Sequence[Inferred]) -> Table | None:
    rows, lines = [x for x in found if x.what == "prompt"], list[Line]()
    for attention in dict.fromkeys(x.attention for x in rows):
        mine = [x for x in rows if x.attention == attention]
        lines.append(Line(contestant_name(attention), SPEED, _cells(mine, rows)))
        if any(x.peak_bytes is not None for x in mine):
            peaks = {x.heading: Cell(f"{x.peak_bytes / 1e9:.2f}") for x in mine if x.peak_bytes is not None}
            lines.append(
                Line(contestant_name(attention), PEAK, tuple(peaks.get(name, Cell()) for name in _headings(rows)))
            )
    paper = {f"{length:,}": Cell(text) for length, text in PAPER_GIGABYTES.items()}
    if paper.keys() & set(_headings(rows)):
        cells = tuple(paper.get(name, Cell()) for name in _headings(rows))
        lines.append(Line("The paper's CoCA (its Fig. 6)", f"paper: {PEAK}", cells))
    title = "The whole model reading a prompt: tokens a second over RoPE's, and memory with weights and cache"
    return _table("coca-prompt", title, "Tokens of the prompt", rows, lines)


def _table(name: str, title: str, heading: str, rows: Sequence[Inferred], lines: list[Line]) -> Table | None:
    caption = " ".join([SPEEDS, *CAPTIONS[name].split()])
    return Table(name, title, caption, tuple(_headings(rows)), tuple(lines), heading) if rows else None


def _headings(rows: Sequence[Inferred]) -> list[str]:
    return [heading for _, heading in sorted({(x.size, x.heading) for x in rows})]


def _cells(mine: Sequence[Inferred], rows: Sequence[Inferred]) -> tuple[Cell, ...]:
    cells = {
        x.heading: Cell("1" if x.attention == "rope" else f"{x.speed.median:.2f}", x.note) for x in mine if x.speed
    }
    return tuple(cells.get(heading, Cell()) for heading in _headings(rows))


def decoding_verdicts(found: Sequence[Inferred]) -> list[str]:
    """How fast CoCA decodes where each model has its fastest mode."""
    rows = sorted((x for x in found if x.mode == BEST and x.attention != "rope"), key=lambda x: x.size)
    said = []
    for attention in dict.fromkeys(x.attention for x in rows):
        each = [f"{x.speed.median:.2f} after {x.heading} tokens" for x in rows if x.attention == attention and x.speed]
        said.append(f"Decoding, {contestant_name(attention)} over RoPE, each in its fastest mode: {', '.join(each)}.")
    return said


def decoding_notes(found: Sequence[Inferred]) -> list[str]:
    """What could not be timed, and why."""
    return [f"Not timed: {x.mode}, {x.heading} tokens ({x.note})." for x in found if x.what == "missing"]
