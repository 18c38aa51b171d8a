"""The cosFormer suite runs end to end, continues, and is shown beside the paper's numbers."""

import json
from pathlib import Path

import pytest

from farspan.reproduce import Preset, main_table, reproduce
from farspan.reproduce.steps import Step, plan
from tests.reproduce.checkpoints import write_texts

TOML = """
[models]
rope = {}
cosformer = { seeds = 2 }
cosformer-plain = {}
linear-coca = {}
hybrid-cosformer = { tasks = ["lm"], options = { num_hidden_layers = 2, global_every = 2 } }
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
    write_texts(folder / "text.jsonl", "Document", 120)
    for name in "abc":
        reviews = [json.dumps({"text": f"{name} review {i}", "label": i % 2}) for i in range(12)]
        (folder / f"{name}.jsonl").write_text("\n".join(reviews) + "\n")
    (folder / "preset.toml").write_text(TOML % {"folder": folder})
    return folder / "preset.toml"


def test_tasks_are_trained_once_and_shown_beside_the_paper(toml: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as no_page:
        no_page.setattr("farspan.report.write_report", lambda folder: folder)
        reproduce(Preset.load(toml), tmp_path, only=["listops"])
    assert [row["step"] for row in json.loads((tmp_path / "status.json").read_text())] == [
        "examples listops",
        *(f"train listops {v} seed 0" for v in ("rope", "cosformer", "cosformer-plain", "linear-coca")),
        "train listops cosformer seed 1",
    ]
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "results").iterdir()}
    assert len(stamps) == 5
    page, failed = reproduce(Preset.load(toml), tmp_path)
    assert failed == []
    assert main_table(tmp_path)[0] == ["task", "lm", "listops", "finetuning"]
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    row = json.loads((tmp_path / "results" / "task-listops-cosformer-s1.json").read_text())["rows"][0]
    assert (row["cases"], row["valid"]["cases"], row["length"], row["variant"]) == (20, 10, 16, "cosformer")
    text = page.read_text()
    assert "cosFormer, Table 4: Long Range Arena" in text
    assert "Table 1: perplexity beyond" not in text
    table = (page.parent / "tables" / "cosformer-lra.md").read_text()
    assert "| cosFormer | ours (2 seeds, 40 cases) |" in table
    assert "| cosFormer | paper | 0.3650 | 0.6770 | 0.7196 |" in table
    assert (page.parent / "tables" / "cosformer-lm.md").is_file()


def tasks_of(steps: list[Step]) -> list[str]:
    return [step.name.removeprefix("examples ") for step in steps if step.kind == "examples"]


def test_without_labelled_texts_their_tasks_are_left_out(tmp_path: Path) -> None:
    preset = Preset.load("cosformer-cpu")
    assert tasks_of(plan(preset, tmp_path)) == ["listops", "lm", "mqar", "pathfinder"]
    with pytest.raises(ValueError, match="--only text needs labelled texts, got none; name three files"):
        plan(preset, tmp_path, ["text"])


def test_tables_choose_their_tasks(tmp_path: Path) -> None:
    steps = plan(Preset.load("cosformer-gpu"), tmp_path, ["cosformer-recall", "cosformer-lm"])
    assert tasks_of(steps) == ["lm", "mqar"]
    some = [step.name for step in plan(Preset.load("cosformer-gpu"), tmp_path, ["mqar", "cosformer"])]
    assert some == ["examples mqar", "train mqar cosformer seed 0", "train mqar cosformer seed 1"]
    with pytest.raises(ValueError, match=r"--only must name some of cosformer-.* got 'table1'"):
        plan(Preset.load("cosformer-gpu"), tmp_path, ["table1"])


@pytest.mark.parametrize("name", ["cosformer-cpu", "cosformer-gpu"])
def test_every_encoder_of_a_shipped_preset_learns_as_many_positions_as_its_texts_have(name: str) -> None:
    preset = Preset.load(name)
    learned = {task: preset.tasks[task].options.get("learned_positions", 0) for task in preset.tasks}
    encoders = ["listops", "text", "finetuning", "pathfinder"]
    assert learned == {task: preset.tasks[task].length if task in encoders else 0 for task in preset.tasks}
