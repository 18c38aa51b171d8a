"""A blank figure in the report's style, and its PNG and SVG."""

import io
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

INK, FAINT = "#1f2328", "#9aa0a6"
TITLE_WIDTH = 44
"""Letters of a title that fit above a figure; more go on another line."""
STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: small files, searchable, read aloud
    "svg.hashsalt": "farspan",  # the same numbers give the same file
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}


@dataclass(frozen=True)
class Figure:
    """A finished figure: its texts, the SVG for the page, and the PNG."""

    name: str
    group: str
    title: str
    caption: str
    svg: str
    png: bytes

    def save(self, folder: Path) -> None:
        """Write both files."""
        (folder / f"{self.name}.svg").write_text(self.svg, encoding="utf-8")
        (folder / f"{self.name}.png").write_bytes(self.png)


def file_of(*parts: str) -> str:
    """A name that is safe as a file and inside the page, whatever a variant is called.

    >>> file_of("depth", "my model", "ntk-4/per_request")
    'depth-my-model-ntk-4-per_request'
    """
    return re.sub(r"[^\w.-]+", "-", "-".join(parts))


def blank(title: str, x: str, y: str, size: tuple[float, float] = (5.0, 3.9)) -> tuple[Canvas, Axes]:
    """A canvas with titled, labelled axes; no pyplot, so that nothing global is left behind."""
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=size, layout="constrained")
        FigureCanvasAgg(canvas)
        axes = canvas.add_subplot()
    axes.set(title=textwrap.fill(title, TITLE_WIDTH), xlabel=x, ylabel=y)
    return canvas, axes


def finish(canvas: Canvas, name: str, group: str, caption: str, columns: int = 3) -> Figure:
    """Legend below the axes, where it hides nothing; then both formats."""
    axes = canvas.axes[0]
    handles, labels = axes.get_legend_handles_labels()
    with matplotlib.rc_context(STYLE):
        if handles:
            canvas.legend(handles, labels, loc="outside lower center", ncols=columns)
        canvas.draw_without_rendering()
        canvas.set_layout_engine("none")  # laid out once; each format would do it again
        svg, png = io.BytesIO(), io.BytesIO()
        canvas.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
        canvas.savefig(png, format="png", dpi=160)
    return Figure(name, group, axes.get_title().replace("\n", " "), caption, svg.getvalue().decode(), png.getvalue())


def inline_svg(figure: Figure) -> str:
    """The SVG as part of a page: no outside references, its own ids, ink in the page's text colour."""
    body = figure.svg[figure.svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'\s(xmlns(:xlink)?|version)="[^"]*"', "", body, count=3)
    body = re.sub(r'^<svg ([^>]*?)(width|height)="[^"]*" ?', r"<svg \1", body)
    body = re.sub(r'^<svg ([^>]*?)(width|height)="[^"]*" ?', r"<svg \1", body)
    body = body.replace("xlink:href", "href").replace(INK, "currentColor")
    body = re.sub(r'\bid="', f'id="{figure.name}-', body)
    body = re.sub(r'(href="#|url\(#)', rf"\g<1>{figure.name}-", body)
    return body.replace("<svg ", '<svg role="img" aria-hidden="true" ', 1)


def short(length: float) -> str:
    """A length as a tick label.

    >>> short(512), short(1024), short(32768), short(1000)
    ('512', '1k', '32k', '1,000')
    """
    return f"{length / 1024:g}k" if length >= 1024 and length % 1024 == 0 else f"{length:,g}"


def length_axis(axes: Axes, lengths: Sequence[int]) -> None:
    """Logarithmic, one tick for each measured length."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(lengths)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.set_xlim(min(lengths) / 1.25, max(lengths) * 1.25)


def log_ticks(low: float, high: float) -> list[float]:
    """Readable ticks of a logarithmic axis: 1-2-5, denser when the range is small.

    >>> log_ticks(17, 45)
    [20, 25.0, 30, 40]
    >>> log_ticks(15, 4000)
    [20, 50, 100, 200, 500, 1000, 2000]
    """
    narrow = high / low < 8
    digits = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8) if narrow else (1, 2, 5) if high / low < 1e4 else (1,)
    ticks = [digit * 10**power for power in range(-2, 13) for digit in digits]
    return [tick for tick in ticks if low <= tick <= high]


def perplexity_axis(axes: Axes, values: Sequence[float]) -> None:
    """Logarithmic; beyond a million nobody reads the difference, and the rest would be squeezed flat."""
    low, high = min(values) / 1.1, min(max(values) * 1.2, 1e6)
    axes.set_yscale("log")
    axes.set_ylim(low, max(high, low * 1.5))
    axes.yaxis.set_major_locator(FixedLocator(log_ticks(*axes.get_ylim())))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def mark_training_length(axes: Axes, length: int, at: Literal["top", "bottom"] = "top") -> None:
    """A vertical line with its name beside it, at the end where the curves are not."""
    axes.axvline(length, color=FAINT, linewidth=1.2, linestyle=":")
    place = axes.get_xaxis_transform()
    axes.annotate(
        "training length",
        (length, 1.0 if at == "top" else 0.0),
        xycoords=place,
        xytext=(3, -2 if at == "top" else 8),
        textcoords="offset points",
        rotation=90,
        va=at,
        ha="left",
        fontsize=8,
        color=FAINT,
    )
