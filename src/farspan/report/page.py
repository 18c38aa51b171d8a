"""A run folder → one offline HTML page, with its tables and figures as files beside it."""

import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from farspan.report.build import control_table, experiment_tables, measured_tables, training_table
from farspan.report.collect import Run, collect
from farspan.report.decodings import DECODING, DECODING_TEXT, decoding_notes, decoding_tables, decoding_verdicts
from farspan.report.experiment import Experiment, load_experiments
from farspan.report.kernels import ALONE, ALONE_TEXT, kernel_tables
from farspan.report.look_section import TEXTS, look_notes, look_table, look_verdicts
from farspan.report.speeds import load_speed_tables, speed_tables, speed_verdicts
from farspan.report.studies import cache_table, study_notes, study_table, study_verdicts
from farspan.report.study_table import load_study_table
from farspan.report.summary import notes, summary, training_text
from farspan.report.tables import Table, to_html, to_latex, to_markdown
from farspan.report.task_table import TaskTable, load_task_tables
from farspan.report.tasks import task_notes, task_table, task_verdicts
from farspan.report.tasks import training_table as task_training
from farspan.report.timings import COSFORMER

TITLES = {
    "lengths": "Past the training length: CoCA, RoPE and ALiBi",
    "tasks": "cosFormer and its tasks",
    "study": "CoCA dropped into an existing model",
    "speed": "What CoCA costs beside RoPE",
}


@dataclass(frozen=True)
class Section:
    """A heading with its figures and tables."""

    anchor: str
    title: str
    text: str
    figures: tuple[Any, ...] = ()
    tables: tuple[Table, ...] = ()
    folded: bool = False
    """Tables that repeat what a figure shows are folded away."""
    small: bool = False


def write_report(folder: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write `index.html`, `tables/*.md|tex` and `figures/*.png|svg`; returns the path of the page.

    Args:
        folder: what `farspan reproduce` or `farspan analyze` wrote: results/*.json and perhaps status.json.
        out: where to write; by default ``folder/report``.
    """
    folder = Path(folder)
    target = Path(out) if out is not None else folder / "report"
    run, experiments = collect(folder), load_experiments()
    from farspan.report.figures import all_figures  # loads matplotlib
    from farspan.report.look_figures import look_figures
    from farspan.report.speed_figures import speed_figures

    figures = ([] if run.is_study else all_figures(run, experiments)) + look_figures(run.looks)
    figures += [figure for table in load_speed_tables() for figure in speed_figures(run.timings, table)]
    sections = make_sections(run, experiments, figures)
    for name in ("tables", "figures"):
        (target / name).mkdir(parents=True, exist_ok=True)
    for figure in figures:
        figure.save(target / "figures")
    for table in (table for section in sections for table in section.tables):
        (target / "tables" / f"{table.name}.md").write_text(to_markdown(table), encoding="utf-8")
        (target / "tables" / f"{table.name}.tex").write_text(to_latex(table), encoding="utf-8")
    page = target / "index.html"
    page.write_text(render(run, experiments, sections), encoding="utf-8")
    return page


def make_sections(run: Run, experiments: list[Experiment], figures: list[Any]) -> list[Section]:
    """Everything on the page, in reading order."""

    def drawn(group: str) -> tuple[Any, ...]:
        return tuple(figure for figure in figures if figure.group == group)

    made = task_sections(run, load_task_tables(), drawn("task-training")) + study_sections(run)
    groups = {"figure1": "perplexity", "table2": "passkey", "figure4": "near-far", "figure5": "distance"}
    by_name = {experiment.name: experiment for experiment in experiments}
    for name in () if not measures_lengths(run) else ("table1", "figure1", "table2", "figure4", "figure5", "table3"):
        experiment = by_name[name]
        tables = tuple(experiment_tables(run, experiment))
        caption = tables[0].caption
        pictures = drawn(groups[name]) if name in groups else ()
        made.append(Section(name, experiment.title, caption, pictures, tables, name.startswith("figure")))
    for speeds in load_speed_tables():
        tables = tuple(speed_tables(run.timings, speeds))
        made.append(Section(speeds.name, speeds.title, speeds.caption, drawn(speeds.name), tables, folded=True))
    made.append(Section("coca-decode", DECODING, DECODING_TEXT, (), tuple(decoding_tables(run.inference))))
    made.append(Section("coca-kernels", ALONE, ALONE_TEXT, (), tuple(kernel_tables(run.inference))))
    depth = "Share of keys found, by their place in the prompt and its length."
    made.append(Section("depth", "Passkey by depth and length", depth, drawn("depth"), small=True))
    for group, (title, text) in TEXTS.items():
        tables = (look_table(run.looks),) if run.looks and group == "angles" else ()
        made.append(Section(f"look-{group}", title, text, drawn(group), tables, small=group == "drift"))
    if (control := control_table(run)) and not run.is_study:  # which has a control for each model in its own table
        made.append(Section("control", "Control", control.caption, (), (control,)))
    training = training_table(run)
    made.append(Section("training", "Training", training_text(run), drawn("training"), (training,) if training else ()))
    everything = "Every variant under every scaling law, whether or not the paper has it."
    made.append(Section("measured", "All measurements", everything, (), tuple(measured_tables(run)), folded=True))
    return [section for section in made if section.figures or section.tables]


def page_title(run: Run) -> str:
    """Of what the run is about."""
    if run.is_study:
        return TITLES["study"]
    if run.rows:
        return TITLES["lengths"]
    if run.tasks or any(timing.subject == COSFORMER for timing in run.timings):
        return TITLES["tasks"]
    return TITLES["speed" if run.timings or run.inference else "lengths"]


def measures_lengths(run: Run) -> bool:
    """Whether this is a run past the training length: otherwise the tables about it would have nothing of ours."""
    if run.is_study:
        return False
    tasks = {"speed"} | {task for table in load_task_tables() for task in table.columns}
    about_tasks = bool(run.tasks or run.timings or run.inference) or any(
        tasks & set(step.step.split()) for step in run.steps
    )
    return bool(run.rows) or (bool(run.steps) and not about_tasks)


def task_sections(run: Run, tables: list[TaskTable], figures: tuple[Any, ...]) -> list[Section]:
    """A section for each table of tasks with something of ours in it."""
    made = []
    for table in tables:
        if (built := task_table(run, table)) is not None:
            made.append(Section(table.name, table.title, built.caption, (), (built,)))
    if training := task_training(run):
        text = "All variants of a task have the same model but for the attention, the same data and the same steps."
        made.append(Section("task-training", "Training for tasks", text, figures, (training,), small=True))
    return made


def study_sections(run: Run) -> list[Section]:
    """The models of a drop-in study beside the paper's, and their caches."""
    made = []
    if run.study:
        table = study_table(run, load_study_table())
        made.append(Section(table.name, table.title, table.caption, (), (table,)))
    if cache := cache_table(run, load_study_table()):
        made.append(Section(cache.name, cache.title, cache.caption, (), (cache,)))
    return made


def provenance(run: Run) -> list[tuple[str, list[str]]]:
    """Where the numbers come from: each different value once."""

    def each(values: Any) -> list[str]:
        return list(dict.fromkeys(values))

    return [
        ("Commit", each(source.commit or "unknown" for source in run.sources)),
        ("Device", each(source.device for source in run.sources)),
        (
            "Versions",
            each(", ".join(f"{name} {version}" for name, version in source.versions) for source in run.sources),
        ),
        ("Seeds", each(str(seed) for seed in [row.seed for row in run.rows] or [s.seed for s in run.sources])),
        ("Commands", each(source.command for source in run.sources)),
        ("Files", each(source.file for source in run.sources)),
    ]


def render(run: Run, experiments: list[Experiment], sections: list[Section]) -> str:
    """The page as HTML; every text from the run is escaped by the template."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    from farspan.report.canvas import inline_svg

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    # Both escape what they are given themselves.
    environment.filters |= {"table": lambda t: Markup(to_html(t)), "svg": lambda f: Markup(inline_svg(f))}
    text = (resources.files("farspan") / "report" / "page.html").read_text(encoding="utf-8")
    lengths = not run.is_study and (bool(run.rows) or (measures_lengths(run) and not run.looks))
    verdicts = (summary(run) if lengths else []) + task_verdicts(run, load_task_tables()) + look_verdicts(run.looks)
    verdicts += study_verdicts(run, load_study_table()) if run.is_study else []
    verdicts += speed_verdicts(run.timings) + decoding_verdicts(run.inference)
    verdicts = verdicts or ["No task is finished yet."]
    said = (notes(run, experiments) if lengths else []) + task_notes(run) + look_notes(run.looks) + study_notes(run)
    said += decoding_notes(run.inference)
    return environment.from_string(text).render(
        title=page_title(run),
        headline=verdicts[0],
        verdicts=verdicts[1:],
        notes=said,
        sections=sections,
        steps=run.steps,
        unfinished=[step for step in run.steps if step.state != "done"],
        provenance=provenance(run),
        mixed=len({source.commit for source in run.sources}) > 1,
    )
