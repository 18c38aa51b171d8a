"""A run folder → one offline HTML page, with its tables and figures as files beside it."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from farspan.experiments import load
from farspan.report import measured
from farspan.report.results import Run, collect
from farspan.report.tables import Table, to_markdown
from farspan.utils import atomic_path, check_folder, write_text

if TYPE_CHECKING:
    from farspan.report.figures import Figure


@dataclass
class Section:
    """A heading with its tables and figures."""

    anchor: str
    title: str
    tables: list[Table]
    figures: "list[Figure]"
    text: str


TITLE = "<title>farspan: "
"""Tells a page of ours."""


def write_report(folder: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write `index.html`, `tables/*.md` and `figures/*.png|svg`; return the path of the page.

    Args:
        folder: what `farspan reproduce` or `farspan analyze` wrote, or any folder with `farspan eval`'s files in
            `results/`.
        out: where to write; by default ``folder/report``.
    """
    target = Path(out) if out is not None else Path(folder) / "report"
    page = target / "index.html"
    if out is not None and not (page.is_file() and TITLE in page.read_text(encoding="utf-8", errors="replace")):
        check_folder(target, what="with an earlier report")
    run = collect(Path(folder))
    try:
        run.analyses.sort(key=lambda found: (found.model.attention != "rope", found.model.label))  # the baseline first
        sections = make_sections(run)
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:  # in rows that are nested deeply
        said = f"{folder}: a row of an analysis is not complete ({error!r})"
        raise ValueError(f"{said}; write it again with `farspan`") from error
    files = {"index.html": render(run, sections)}
    for table in (table for section in sections for table in section.tables):
        files[f"tables/{table.name}.md"] = to_markdown(table)
    for figure in (figure for section in sections for figure in section.figures):
        files[f"figures/{figure.name}.svg"] = figure.svg
        with atomic_path(target / "figures" / f"{figure.name}.png") as path:
            path.write_bytes(figure.png)
    for name, text in files.items():
        write_text(target / name, text)
    return target / "index.html"


def make_sections(run: Run) -> list[Section]:
    """Return everything on the page, in reading order."""
    from farspan.report import analysis, figures  # load matplotlib

    made: list[Section] = []

    def add(
        anchor: str, title: str, tables: Iterable[Table | None], drawn: "figures.Figures" = (), text: str = ""
    ) -> None:
        shown, found = [table for table in tables if table], [figure for figure in drawn if figure]
        text = text or next((table.caption for table in shown), "")
        if shown or found:
            made.append(Section(anchor, title, shown, found, text))

    for x in load("tasks"):
        add(x.name, x.title, [measured.task_table(run, x)])
    add("task-training", "Training for tasks", [measured.task_training_table(run)])
    for table in measured.study_tables(run):
        add(table.name, table.title, [table])
    whole = not run.is_study  # whose own table stands beside the paper's; its models are too many for a figure
    for x in load("perplexity", "passkey") if whole else ():
        add(x.name, x.title, measured.experiment_tables(run, x))
    perplexities, passkeys = measured.measured_table(run, "perplexity"), measured.measured_table(run, "passkey")
    add("perplexity", "Perplexity by window length", [perplexities], figures.perplexity_figures(run) if whole else ())
    text = "By distance: the prompts of all lengths together." if whole else ""
    add("passkey", "Passkey", [passkeys], figures.passkey_figures(run) if whole else (), text)
    add("positions", "Loss by position", [measured.position_table(run)], [figures.position_figure(run)])
    add("retrieval", "Retrieval", [measured.retrieval_table(run)], figures.retrieval_figures(run))
    for anchor, title, summary, found, text in analysis.sections(run.analyses):
        add(anchor, title, [summary], found, text)
    add("training", "Training", [measured.training_table(run)], [figures.loss_figure(run.of("training"))])
    return made


def render(run: Run, sections: list[Section]) -> str:
    """Return the page as HTML; the template escapes every text of the run."""
    from jinja2 import Environment, StrictUndefined

    from farspan.report.figures import inline_svg

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["svg"] = inline_svg
    text = (resources.files("farspan") / "report" / "page.html").read_text(encoding="utf-8")
    return environment.from_string(text).render(
        title="CoCA dropped into an existing model" if run.is_study else "Past the training length",
        sections=sections,
        steps=run.steps,
        unfinished=[step for step in run.steps if step.state != "done"],
        sources=run.sources,
    )
