"""A run folder → one offline HTML page, with its tables and figures as files beside it."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farspan.experiments import VARIANTS, load, load_all
from farspan.report.measured import (
    control_table,
    experiment_tables,
    measured_tables,
    position_table,
    retrieval_table,
    study_tables,
    task_table,
    task_training_table,
    training_table,
    variants_in,
)
from farspan.report.results import BENCHES, Run, collect
from farspan.report.speed import decoding_tables, kernel_tables, speed_tables
from farspan.report.tables import Table, to_latex, to_markdown
from farspan.utils import atomic_path, write_text

if TYPE_CHECKING:
    from farspan.report.figures import Figure

READING = ("table1", "figure1", "table2", "figure4", "figure5", "table3")
"""The experiments on lengths in the order of the page."""


@dataclass
class Section:
    """A heading with its tables and figures."""

    anchor: str
    title: str
    tables: list[Table]
    text: str = ""
    figures: "list[Figure]" = field(default_factory=list)
    folded: bool = False
    """Hide the tables behind a click: figures show the same."""
    small: bool = False


def write_report(folder: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write `index.html`, `tables/*.md|tex` and `figures/*.png|svg`; return the path of the page.

    Args:
        folder: what `farspan reproduce` or `farspan analyze` wrote, or any folder with `farspan eval`'s files in
            `results/`.
        out: where to write; by default ``folder/report``.
    """
    target = Path(out) if out is not None else Path(folder) / "report"
    run = collect(Path(folder))
    from farspan.report.analysis import analysis_figures  # loads matplotlib
    from farspan.report.figures import length_figures, other_figures

    try:
        run.analyses.sort(key=lambda found: (found.model.attention != "rope", found.label))  # the baseline first
        figures = [] if run.is_study else length_figures(run)
        figures += [*other_figures(run), *analysis_figures(run.analyses)]
        sections = make_sections(run, figures)
        files = {"index.html": render(run, sections)}
        for table in (table for section in sections for table in section.tables):
            files |= {f"tables/{table.name}.md": to_markdown(table), f"tables/{table.name}.tex": to_latex(table)}
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:  # in rows that are nested deeply
        said = f"{folder}: a row of a benchmark or an analysis is not complete ({error!r})"
        raise ValueError(f"{said}; write it again with `farspan`") from error
    for figure in figures:
        files[f"figures/{figure.name}.svg"] = figure.svg
        with atomic_path(target / "figures" / f"{figure.name}.png") as path:
            path.write_bytes(figure.png)
    for name, text in files.items():
        write_text(target / name, text)
    return target / "index.html"


def make_sections(run: Run, figures: "list[Figure]") -> list[Section]:
    """Return everything on the page, in reading order."""
    from farspan.report.analysis import SECTIONS, analysis_tables

    def drawn(group: str) -> "list[Figure]":
        return [figure for figure in figures if figure.group == group]

    def of(*tables: Table | None) -> list[Table]:
        return [table for table in tables if table]

    experiments = {experiment.name: experiment for experiment in load_all()}
    made = [Section(x.name, x.title, of(task_table(run, x)), x.caption) for x in load("tasks")]
    trained = of(task_training_table(run))
    made.append(Section("task-training", "Training for tasks", trained, "", drawn("task-training"), small=True))
    made += [Section(table.name, table.title, [table], table.caption) for table in study_tables(run)]
    groups = {"figure1": "perplexity", "table2": "passkey", "figure4": "near-far", "figure5": "distance"}
    others = []  # figures of variants that the paper does not have
    for name in READING:
        x, tables, pictures = experiments[name], experiment_tables(run, experiments[name]), drawn(groups.get(name, ""))
        others += [] if tables else pictures
        made.append(Section(name, x.title, tables, x.caption, pictures if tables else [], name.startswith("figure")))
    made.append(Section("positions", "Loss by position", of(position_table(run)), "", drawn("positions")))
    made.append(Section("retrieval", "Retrieval", of(retrieval_table(run)), "", drawn("retrieval"), small=True))
    for x in load("speed"):
        made.append(Section(x.name, x.title, speed_tables(run, x), x.caption, drawn(x.name), folded=True))
    above = "Speed over RoPE's in the same run; above 1 CoCA is faster."
    made.append(Section("coca-decode", "Decoding and reading: CoCA beside RoPE", decoding_tables(run), above))
    made.append(Section("coca-kernels", "Attention alone: CoCA's kernels beside RoPE's", kernel_tables(run), above))
    depth = "Share of keys found, by depth and length of the prompt."
    made.append(Section("depth", "Passkey by depth and length", [], depth, drawn("depth"), small=True))
    for group, (title, text) in SECTIONS.items():
        wanted = {"angles": "analysis", "slack": "analysis-slack"}.get(group)
        shown = [table for table in analysis_tables(run.analyses) if table.name == wanted]
        made.append(Section(f"look-{group}", title, shown, text, drawn(group), small=group == "drift"))
    if not run.is_study:  # whose own table has the control
        made.append(Section("control", "Control", of(control_table(run))))
    made.append(Section("training", "Training", of(training_table(run)), "", drawn("training")))
    papers = all(variant in VARIANTS for variant in variants_in(run))  # else the only table with all of them
    folded = papers or run.is_study
    made.append(Section("measured", "All measurements", measured_tables(run), "", others, folded=folded))
    for section in made:
        for table in section.tables:
            section.text = section.text or table.caption
    return [section for section in made if section.figures or section.tables]


def page_title(run: Run) -> str:
    """Name what the run is about."""
    if run.is_study:
        return "CoCA dropped into an existing model"
    if run.of("task") or run.of("bench-cosformer"):
        return "cosFormer and its tasks"
    return (
        "What CoCA costs beside RoPE"
        if run.records.keys() <= set(BENCHES) and run.records
        else "Past the training length"
    )


def provenance(run: Run) -> list[tuple[str, list[str]]]:
    """Return each different origin of the numbers once."""

    def each(values: Iterable[Any]) -> list[str]:
        return list(dict.fromkeys(map(str, values)))

    versions = (", ".join(f"{name} {number}" for name, number in sorted(x.versions.items())) for x in run.sources)
    return [
        ("Commit", each(x.commit or "unknown" for x in run.sources)),
        ("Device", each(x.device for x in run.sources)),
        ("Versions", each(versions)),
        ("Seeds", each(x.get("seed", 0) for rows in [*run.records.values(), run.sources] for x in rows)),
        ("Commands", each(x.command for x in run.sources)),
        ("Files", each(x.file for x in run.sources)),
    ]


def render(run: Run, sections: list[Section]) -> str:
    """Return the page as HTML; the template escapes every text of the run."""
    from jinja2 import Environment, StrictUndefined

    from farspan.report.figures import inline_svg

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["svg"] = inline_svg
    text = (resources.files("farspan") / "report" / "page.html").read_text(encoding="utf-8")
    unfinished = [step for step in run.steps if step.state != "done"]
    return environment.from_string(text).render(
        title=page_title(run), sections=sections, steps=run.steps, unfinished=unfinished, provenance=provenance(run)
    )
