"""The cosFormer suite runs end to end, continues, and is shown beside the paper's numbers."""

import json
from pathlib import Path

import pytest

from farspan.files import claim
from farspan.report.task_table import load_task_tables, parse_task_table
from farspan.reproduce import Preset, reproduce
from farspan.reproduce.plan import plan
from farspan.reproduce.run import _attempt
from farspan.reproduce.work import Work
from farspan.tasks import TASKS
from tests.command_line import refusal
from tests.reproduce.status import states

TOML = """
variants = ["rope", "cosformer", "cosformer-plain", "linear-coca"]
seeds = { cosformer = 2 }
[corpus]
train = { "%(folder)s/text.jsonl" = 1.0 }
labelled = ["%(folder)s/a.jsonl", "%(folder)s/b.jsonl", "%(folder)s/c.jsonl"]
[evaluation]
texts = 2
text_tokens = 128
[tasks.listops]
length = 16
generator = { max_depth = 3, max_args = 3, min_length = 3, max_length = 16 }
options = { num_hidden_layers = 1, hidden_size = 16, intermediate_size = 16 }
steps = 6
batch_size = 8
train = 50
valid = 10
test = 20
[tasks.lm]
length = 16
options = { num_hidden_layers = 1, hidden_size = 16, intermediate_size = 16 }
steps = 3
batch_size = 4
[tasks.finetuning]
length = 16
options = { num_hidden_layers = 1, hidden_size = 16, intermediate_size = 16 }
pretraining_steps = 2
pretraining_batch_size = 4
steps = 2
batch_size = 4
"""


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    lines = [json.dumps({"text": f"Document {i} says {i * 7} and {i * i}. " * 20}) for i in range(120)]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    for name in "abc":
        reviews = [json.dumps({"text": f"{name} review {i}", "label": i % 2}) for i in range(12)]
        (folder / f"{name}.jsonl").write_text("\n".join(reviews) + "\n")
    (folder / "preset.toml").write_text(TOML % {"folder": folder})
    return folder / "preset.toml"


def test_tasks_are_trained_once_and_shown_beside_the_paper(toml: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as no_page:
        no_page.setattr("farspan.report.write_report", lambda folder: folder)
        reproduce(Preset.load(toml), tmp_path, only=["listops"])
    assert list(states(tmp_path)) == [
        "data",
        *(f"train listops {v} seed 0" for v in ("rope", "cosformer", "cosformer-plain", "linear-coca")),
        "train listops cosformer seed 1",
    ]
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "results").iterdir()}
    assert len(stamps) == 5
    page = reproduce(Preset.load(toml), tmp_path)
    assert set(states(tmp_path).values()) == {"done"}
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    row = json.loads((tmp_path / "results" / "task-listops-cosformer-s1.json").read_text())["rows"][0]
    assert (row["cases"], row["valid"]["cases"], row["length"], row["variant"]) == (20, 10, 16, "cosformer")
    text = page.read_text()
    assert "cosFormer, Table 4: Long Range Arena" in text
    assert "Table 1: perplexity beyond" not in text
    table = (page.parent / "tables" / "cosformer-lra.md").read_text()
    assert "| cosFormer | ours (2 seeds, 40 cases) |" in table
    assert "| cosFormer | paper | 0.3650 | 0.6770 | 0.7196 |" in table
    assert (page.parent / "figures" / "loss-listops.svg").is_file()
    assert (page.parent / "tables" / "cosformer-lm.md").is_file()
    assert not (page.parent / "tables" / "cosformer-memory.md").is_file()  # nothing of it on a CPU


def test_data_for_other_tasks_are_made_by_one_process_at_a_time(toml: Path, tmp_path: Path) -> None:
    """They share the corpus."""
    preset = Preset.load(toml)
    first, other = (plan(preset, tmp_path, [name])[0] for name in ("listops", "lm"))
    assert first.result != other.result
    with claim(tmp_path / "locks" / first.lock) as mine:
        assert mine
        assert _attempt(Work(preset, tmp_path, lambda what, part: None), other, {})["state"] == "busy"


def test_without_labelled_texts_their_tasks_are_left_out(tmp_path: Path) -> None:
    preset = Preset.load("cosformer-cpu")
    tasks = dict.fromkeys(step.task for step in plan(preset, tmp_path) if step.task)
    assert list(tasks) == ["listops", "lm", "mqar", "pathfinder"]
    with pytest.raises(ValueError, match="--only text needs labelled texts, got none; name three files"):
        plan(preset, tmp_path, ["text"])


def test_tables_choose_their_tasks(tmp_path: Path) -> None:
    steps = plan(Preset.load("cosformer-gpu"), tmp_path, ["cosformer-recall", "cosformer-lm"])
    assert list(dict.fromkeys(step.task for step in steps if step.task)) == ["lm", "mqar"]
    with pytest.raises(ValueError, match=r"--only must name some of cosformer-finetuning, .* got 'table1'"):
        plan(Preset.load("cosformer-gpu"), tmp_path, ["table1"])


@pytest.mark.parametrize("name", ["cosformer-cpu", "cosformer-gpu"])
def test_every_encoder_of_a_shipped_preset_learns_as_many_positions_as_its_texts_have(name: str) -> None:
    preset = Preset.load(name)
    learned = {task: preset.task(task).options.get("learned_positions", 0) for task in preset.tasks}
    assert learned == {task: preset.task(task).length if TASKS[task].encoder else 0 for task in preset.tasks}
    assert [task for task in learned if learned[task]] == ["listops", "text", "finetuning", "pathfinder"]


def test_every_table_of_tasks_has_the_four_attentions() -> None:
    for table in load_task_tables():
        assert [row.variant for row in table.rows] == ["rope", "cosformer", "cosformer-plain", "linear-coca"]


def test_a_table_whose_numbers_do_not_fit_its_columns_is_refused() -> None:
    text = 'title = "t"\nkind = "tasks"\nmeasure = "%s"\ncolumns = ["lm"]\nheadings = ["LM"]\n[[rows]]\nlabel = "a"\n'
    rows = 'variant = "rope"\npaper = [1.0, 2.0]'
    with pytest.raises(ValueError, match="experiment x: paper must have one value for each of the 1 columns, got 2"):
        parse_task_table("x", text % "accuracy" + rows)
    with pytest.raises(ValueError, match=r"measure must be one of .* got 'acuracy'; did you mean 'accuracy'"):
        parse_task_table("x", text % "acuracy" + rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "listop"], "--only must name some of cosformer-finetuning"),
        (
            ["--labelled", "a.jsonl"],
            "labelled must name three files, for training, for choices and for the test",
        ),
        (["--labelled", "a", "--labelled", "b", "--labelled", "c"], "--labelled must name a JSON-lines file, got 'a'"),
    ],
)
def test_bad_input_exits_2_with_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    said = refusal("reproduce", "--preset", "cosformer-cpu", "--out", "x", *arguments, cwd=tmp_path)
    assert message in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tasks.listop]", "tasks must be one of .* got 'listop'; did you mean 'listops'?"),
        ("[tasks.listops]\nstep = 3", "configuration key tasks.listops.step must be one of .* did you mean 'steps'?"),
        ("[tasks]\nlistops = 3", "tasks.listops must be a table, got 3"),
    ],
)
def test_tasks_that_cannot_be_meant_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Preset.load(path)
