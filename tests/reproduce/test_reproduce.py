"""A reproduction runs end to end, continues after an interruption, and survives a step that fails."""

import json
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from farspan.files import claim
from farspan.reproduce import Preset, Standing, reproduce
from farspan.reproduce.plan import plan
from farspan.reproduce.preset import NAMES
from farspan.reproduce.run import _write_status
from farspan.reproduce.work import Work
from tests.command_line import called, farspan, refusal, started
from tests.reproduce.status import states

TOML = """
variants = ["rope", "coca-exact"]
seeds = { rope = 2 }
[corpus]
train = { "%s" = 1.0 }
[training]
preset = "tiny"
length = 16
batch_size = 4
steps = 6
options = { num_hidden_layers = 1, hidden_size = 32, intermediate_size = 48 }
[evaluation]
scalings = ["none", "ntk-4"]
perplexity_lengths = [16, 64]
texts = 2
text_tokens = 128
passkey_lengths = [240]
cases = 2
new_tokens = 3
"""


TWO_PROCESSES = """
import farspan.report, farspan.reproduce.run as run
from farspan.reproduce.work import Work

do, run.POLL_SECONDS = Work.do, 0.05

def tell(self, step):
    print("doing", step.name, flush=True)
    do(self, step)

def page(folder):
    writing = folder / "writing"
    writing.mkdir()  # an error where two processes write at a time
    writing.rmdir()
    return folder / "report" / "index.html"

Work.do, farspan.report.write_report = tell, page
"""


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    lines = [json.dumps({"text": f"Document {i} says {i * 7} and {i * i}. " * 20}) for i in range(120)]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "preset.toml").write_text(TOML % (folder / "text.jsonl"))
    return folder / "preset.toml"


@pytest.fixture(scope="module")
def whole(toml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reproduction by one process, from the command line, without interruption."""
    out = tmp_path_factory.mktemp("whole")
    done = farspan("reproduce", "--preset", toml, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "RoFormer" in done.stdout
    assert str(out / "report" / "index.html") in done.stdout.replace("\n", "")
    return out


def test_everything_is_measured_once_and_ends_in_a_page(toml: Path, whole: Path) -> None:
    assert set(states(whole).values()) == {"done"}
    names = {p.name for p in (whole / "results").iterdir()}
    assert {"train-rope-s1.json", "ppl-coca-exact-s0-ntk-4.json", "passkey-rope-s0-none.json"} <= names
    rows = json.loads((whole / "results" / "ppl-rope-s0-none.json").read_text())["rows"]
    assert [(row["length"], row["mode"]) for row in rows] == [(16, "sliding"), (64, "sliding"), (16, "truncated")]
    stamps = {p: p.stat().st_mtime_ns for p in (whole / "results").iterdir()}
    page = reproduce(Preset.load(toml), whole)
    assert "RoPE" in page.read_text()
    assert {p: p.stat().st_mtime_ns for p in (whole / "results").iterdir()} == stamps


def test_two_processes_share_the_steps_of_one_folder(toml: Path, whole: Path, tmp_path: Path) -> None:
    command = ("reproduce", "--preset", toml, "--only", "table1,figure4", "--out", tmp_path)
    with ExitStack() as running:
        both = [running.enter_context(started(*command, before=TWO_PROCESSES)) for _ in "ab"]
        done = [one.wait() for one in both]
    assert [one.returncode for one in done] == [0, 0], done
    assert set(states(tmp_path).values()) == {"done"}
    steps = [line for one in done for line in one.stdout.splitlines() if line.startswith("doing")]
    assert len(steps) == len(set(steps)) == len(states(tmp_path))
    for path in (whole / "results").iterdir():
        shared, alone = (json.loads((who / "results" / path.name).read_text()) for who in (tmp_path, whole))
        for row, expected in zip(shared["rows"], alone["rows"], strict=True):
            for key in {"final_loss", "nll", "correct"} & expected.keys():
                assert row[key] == pytest.approx(expected[key]), path.name


@pytest.mark.usefixtures("no_page")
def test_a_step_in_other_hands_is_waited_for(toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farspan.reproduce.run.POLL_SECONDS", 0.05)
    seen: list[str] = []
    original = Work.do
    monkeypatch.setattr(Work, "do", lambda self, step: (seen.append(step.name), original(self, step))[1])
    with claim(tmp_path / "locks" / "train-rope-s0") as mine:
        assert mine
        runner = threading.Thread(target=partial(reproduce, Preset.load(toml), tmp_path, only=["table1"]))
        runner.start()
        deadline = time.monotonic() + 120
        while (
            states(tmp_path).get("ppl coca-exact seed 0 none") != "done"
            if (tmp_path / "status.json").exists()
            else True
        ):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert "train rope seed 0" not in seen
    runner.join()
    assert set(states(tmp_path).values()) == {"done"}
    assert len(seen) == len(set(seen))


def test_a_failed_step_is_named_and_the_rest_go_on(toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Work._train

    def fails(self: Work, step) -> None:
        if step.variant == "rope":
            raise RuntimeError("out of\nmemory")
        original(self, step)

    monkeypatch.setattr(Work, "_train", fails)
    page = reproduce(Preset.load(toml), tmp_path, only=["table1"])
    found = states(tmp_path)
    assert found["train rope seed 0"] == "failed"
    assert found["ppl rope seed 0 none"] == "pending"
    assert found["ppl coca-exact seed 0 ntk-4"] == "done"
    assert "out of memory" in page.read_text()
    monkeypatch.undo()
    monkeypatch.setattr("farspan.report.write_report", lambda folder: folder)
    reproduce(Preset.load(toml), tmp_path, only=["table1"])
    assert set(states(tmp_path).values()) == {"done"}


def test_a_status_file_keeps_how_steps_ended_for_others(tmp_path: Path) -> None:
    def state(name: str) -> dict[str, str]:
        return {"state": name, "message": ""}

    _write_status(tmp_path, {"a": state("done"), "b": state("failed"), "c": state("busy"), "d": state("pending")})
    _write_status(tmp_path, {"a": state("busy"), "b": state("pending"), "c": state("pending"), "e": state("pending")})
    assert states(tmp_path) == {"a": "done", "b": "failed", "c": "pending", "d": "pending", "e": "pending"}
    _write_status(tmp_path, {"b": state("done")})  # tried again
    assert states(tmp_path)["b"] == "done"


@pytest.mark.usefixtures("no_page")
def test_only_this_calls_failures_are_its_own(toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [{"step": "train alibi seed 0", "state": "failed", "message": "elsewhere"}]
    (tmp_path / "status.json").write_text(json.dumps(others))
    seen: list[Standing] = []

    def fails(self: Work, step) -> None:
        raise RuntimeError("no text")

    monkeypatch.setattr(Work, "_data", fails)
    reproduce(Preset.load(toml), tmp_path, report=seen.append)
    assert seen[-1].failed == ("data: RuntimeError: no text",)
    assert states(tmp_path)["train alibi seed 0"] == "failed"


def test_a_folder_keeps_to_its_preset(toml: Path, tmp_path: Path) -> None:
    preset = Preset.load(toml)
    (tmp_path / "preset.txt").write_text(repr(replace(preset, variants=["alibi"])))
    with pytest.raises(ValueError, match="holds a reproduction with other settings; choose another --out"):
        reproduce(preset, tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_shipped_presets_parse_and_plan(name: str, tmp_path: Path) -> None:
    steps = plan(Preset.load(name), tmp_path)
    assert steps[0].kind == ("convert" if name.startswith("dropin") else "data")
    assert len(steps) > 6
    assert len({step.result for step in steps}) == len({step.name for step in steps}) == len(steps)
    for number, step in enumerate(steps):
        assert set(step.needs) <= {before.name for before in steps[:number]}
    assert not any(step.variant == "alibi" and step.scaling != "none" for step in steps)


def test_only_what_dynamic_ntk_can_stretch_is_measured_under_it(tmp_path: Path) -> None:
    variants = ["rope", "alibi", "coca-slack", "cosformer", "cosformer-plain", "linear-coca"]
    steps = plan(replace(Preset.load("cpu"), variants=variants), tmp_path)
    assert {step.variant for step in steps if step.kind == "ppl"} == {*variants}
    assert {step.variant for step in steps if step.scaling != "none"} == {"rope", "coca-slack"}


def test_the_command_line_evaluates_what_was_trained(toml: Path, whole: Path, tmp_path: Path) -> None:
    model, text = whole / "runs" / "coca-exact-s0" / "model", toml.parent / "text.jsonl"
    out = tmp_path / "ppl.json"
    options = ("--lengths", "16,64", "--stride", "8", "--ntk", "4", "--texts", "2", "--text-tokens", "100")
    status, _, err = called("eval", "ppl", model, "--text", text, *options, "--out", out)
    assert status == 0, err
    rows = json.loads(out.read_text())["rows"]
    assert set(rows[0]) >= {"length", "stride", "mode", "scaling", "nll", "tokens", "ppl"}
    assert (rows[0]["scaling"], rows[-1]["mode"]) == ("ntk-4", "truncated")
    out = tmp_path / "passkey.json"
    options = ("--lengths", "240", "--cases", "2", "--new-tokens", "2")
    status, _, err = called("eval", "passkey", model, *options, "--out", out)
    assert status == 0, err
    row = json.loads(out.read_text())["rows"][0]
    assert set(row) >= {"length", "cases", "correct", "accuracy", "ci95", "scaling"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["reproduce", "--preset", "gppu", "--out", "x"],
            "'cosformer-cpu', 'cosformer-gpu', 'dropin-cpu', 'dropin', got 'gppu'; did you mean",
        ),
        (["reproduce", "--only", "table9", "--out", "x"], "--only must name some of table1"),
        (
            ["reproduce", "--text", "books=many", "--out", "x"],
            "--text must be SOURCE or SOURCE=WEIGHT with a weight above 0, got 'books=many'",
        ),
        (["reproduce", "--text", "nowhere.txt=1", "--out", "x"], "source must exist, got 'nowhere.txt'"),
        (["reproduce", "--held-out", "nowhere.txt", "--out", "x"], "source must exist, got 'nowhere.txt'"),
        (["reproduce", "--tokenizer", "nowhere.json", "--out", "x"], "tokenizer must exist, got 'nowhere.json'"),
        (
            ["eval", "ppl", "nowhere", "--text", "x"],
            "checkpoint must be a folder or a .gguf file, got 'nowhere', which does",
        ),
        (
            ["train", "nowhere.toml", "--out", "x"],
            "config must be a TOML file, got 'nowhere.toml', which does not exist",
        ),
    ],
)
def test_bad_input_exits_2_with_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    assert message in refusal(*arguments, cwd=tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('variants = ["ropee"]', "variants must be one of .* got 'ropee'; did you mean 'rope'?"),
        ('[evaluation]\nscalings = ["ntk4"]', "evaluation.scalings must be 'none' or like 'ntk-4' .* got 'ntk4'"),
        ("variants = [", "is not valid TOML"),
        ("variants = []", "variants must name at least one attention, got none"),
        ("seeds = { rope = 0 }", "seeds.rope must be at least 1, got 0"),
        ("seeds = { rope = 'x' }", "seeds.rope must be int, got 'x'"),
        ("[evaluation]\nscalings = [4]", r"evaluation.scalings\[0\] must be str, got 4"),
        (
            "[evaluation]\nperplexity_lengths = [-64]",
            "evaluation.perplexity_lengths must be whole numbers from 1 on, got -64",
        ),
        ("[training]\nsteps = -2", "training.steps must be whole numbers from 1 on, got -2; leave it out"),
        ("[training]\npreset = 'tny'", "training.preset must be one of .* got 'tny'; did you mean 'tiny'"),
        ("[training]\npeak_lr = 0.0", "training.peak_lr must be above 0, got 0.0"),
        ("[corpus]\ntokenizer = '5'", "tokenizer must be a name, a folder or a size from 257 on, got 5; try 8192"),
        ("[corpus]\nheld_out = [3]", r"corpus.held_out\[0\] must be str, got 3"),
        ("[corpus]\nlabelled = ['a', 'b', 'c']", "labelled texts are for a preset with tasks, such as cosformer-cpu"),
        ("[tasks.listops]\nlength = 7", "tasks.listops.length must be 2000 with this generator, got 7"),
        ("[tasks.mqar]\nlength = 64\ngenerator = { pairs = 'x' }", "tasks.mqar.generator.pairs must be int, got 'x'"),
        (
            "[tasks.text]\noptions = { hidden_size = 'x' }",
            "options of preset 'tiny' must be .*got str",
        ),
        ("[tasks.lm]\nlength = 1", "data.length must be at least 2, got 1"),
        ("[tasks.finetuning]\nsteps = 3", "tasks.finetuning.pretraining_steps must be at least 1, got 0"),
        ("[speed]\ncontexts = [8]\n[tasks.mqar]\nlength = 64", "speed.contexts must be left out beside tasks"),
        ("[trainin]", "configuration key trainin must be one of .* did you mean 'training'?"),
    ],
)
def test_a_preset_that_cannot_be_meant_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Preset.load(path)
