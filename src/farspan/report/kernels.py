"""CoCA's attention alone → tables of speeds over RoPE's: shapes one by one, and all of decoding by heads and length."""

from collections.abc import Iterable, Mapping, Sequence

from farspan.report.inference import Inferred, Shape
from farspan.report.names import contestant_name
from farspan.report.tables import Cell, Line, Table

ALONE = "Attention alone: CoCA's kernels beside RoPE's"
COMPARED = """
    Speeds are multiples of RoPE's in the same run: above 1 CoCA is faster. RoPE's keys are cached ready, turning
    its query is not charged to it, and it has the fastest of SDPA's kernels that were timed (named under its time).
    CoCA's kernels read the cached t, half as wide, and turn it themselves. In decoding, one query a head, RoPE
    reads 1.33 times their bytes, which is about all that there is to gain. A copy, of whose speed others are
    shares, also writes: more than 100% is no mistake. For a chunk of queries CoCA's keys can be made ready for SDPA
    instead, as models do when they read a prompt. On random numbers; each answer of CoCA's kernels was checked
    against wider arithmetic before it was timed. A dash was not timed.
"""
ALONE_TEXT = " ".join(COMPARED.split())
ROPE = "rope"
REMOVED = "8-bit t"
"""Marks a removed variant, which earlier results still contain."""

Answers = Mapping[Shape, Mapping[str, Inferred]]
"""Shape → contestant → how fast it was."""


def kernel_tables(found: Iterable[Inferred]) -> list[Table]:
    """Decoding by length, and chunks of queries."""
    answers: dict[Shape, dict[str, Inferred]] = {}
    for x in found:
        if x.shape is not None and REMOVED not in x.attention:
            answers.setdefault(x.shape, {})[x.attention] = x
    steps = {shape: answers[shape] for shape in sorted(answers, key=_order) if shape.n == 1}
    chunks = {shape: answers[shape] for shape in sorted(answers, key=_order) if shape.n > 1}
    made = [
        _grid("coca-kernels-lengths", steps),
        _list("coca-kernels-chunks", "A chunk of queries after a long text: speed over RoPE's", chunks),
    ]
    return [table for table in made if table is not None]


def _order(shape: Shape) -> tuple[int, ...]:
    """Wide heads first, then few a key head, long texts and many of them."""
    return -shape.d, shape.h // shape.g, -shape.h, shape.n, -shape.m, -shape.b


def _list(name: str, title: str, answers: Answers) -> Table | None:
    """Shapes down, contestants across."""
    names = list(dict.fromkeys(name for each in answers.values() for name in each))
    lines = [
        Line(_heads(shape), _amount(shape), tuple(_cell(each.get(name)) for name in names))
        for shape, each in answers.items()
    ]
    columns = tuple(contestant_name(name) for name in names)
    return Table(name, title, ALONE_TEXT, columns, tuple(lines), "Heads", "Texts × tokens before") if lines else None


def _grid(name: str, answers: Answers) -> Table | None:
    """Heads and texts down, tokens across."""
    contestants = (name for each in answers.values() for name in each if name != ROPE)
    names, lengths = list(dict.fromkeys(contestants)), sorted({shape.m for shape in answers})
    lines = [
        Line(
            _heads(row),
            f"{row.b:,} text{'s' if row.b > 1 else ''}",
            tuple(_joined(answers.get(row._replace(m=length), {}), names) for length in lengths),
        )
        for row in sorted({shape._replace(m=0) for shape in answers}, key=lambda row: (*_order(row)[:3], row.b))
    ]
    if not lines:
        return None
    others = "".join(f"; the speed of {contestant_name(name)}" for name in names[1:])
    title = (
        f"Decoding by tokens before: speed of {contestant_name(names[0])} over RoPE's (small print: its time{others})"
    )
    return Table(name, title, ALONE_TEXT, tuple(f"{n:,} tokens" for n in lengths), tuple(lines), "Heads", "Texts")


def _heads(shape: Shape) -> str:
    """
    >>> _heads(Shape(8, 32, 8, 1, 512, 128))
    '32 heads of width 128, 8 for keys'
    """
    return f"{shape.h} heads of width {shape.d}" + (f", {shape.g} for keys" if shape.g < shape.h else "")


def _amount(shape: Shape) -> str:
    """
    >>> _amount(Shape(8, 32, 8, 1, 512, 128)), _amount(Shape(1, 32, 8, 2048, 8192, 128))
    ('8 × 512', '1 × 8,192, 2,048 queries')
    """
    return f"{shape.b} × {shape.m:,}" + (f", {shape.n:,} queries" if shape.n > 1 else "")


def _cell(x: Inferred | None) -> Cell:
    if x is None or x.speed is None:
        return Cell()
    notes = filter(None, (f"{x.milliseconds:.3f} ms", contestant_name(x.mode), x.note))
    return Cell("1" if x.attention == ROPE else f"{x.speed.median:.2f}", "; ".join(notes))


def _joined(each: Mapping[str, Inferred], names: Sequence[str]) -> Cell:
    """The first contestant's speed and time, the others' speeds in small print."""
    found = [(contestant_name(name), each[name]) for name in names if name in each]
    texts = [(label, f"{x.speed.median:.2f}", f"{x.milliseconds:.3f} ms") for label, x in found if x.speed]
    if not texts:
        return Cell()
    return Cell(texts[0][1], "; ".join([texts[0][2], *(f"{label} {speed}" for label, speed, _ in texts[1:])]))
