"""A drop-in study runs end to end, shares what its runs have in common, and goes on after any interruption."""

import json
import signal
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import farspan.training.loop as loop
import farspan_cli
from farspan.files import claim
from farspan.reproduce import Preset, reproduce
from farspan.reproduce.plan import plan
from farspan.reproduce.step import Step
from farspan.reproduce.study_work import StudyWork
from tests.command_line import started
from tests.helpers import losses
from tests.reproduce.checkpoints import made
from tests.reproduce.status import states

STAGES = ["distill-1-attention", "distill-2-logits", "distill-3-text", "distill-long-4-long"]


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def whole(toml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study without interruption."""
    out = tmp_path_factory.mktemp("whole")
    reproduce(Preset.load(toml), out)
    return out


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "results" / f"{name}.json").read_text())["rows"]
    return found


def test_every_model_is_made_and_measured_and_shown(whole: Path) -> None:
    assert set(states(whole).values()) == {"done"}
    windows = [(row["length"], row["mode"], row["stride"]) for row in rows(whole, "ppl-near-original-none")]
    assert windows == [(16, "sliding", 8), (32, "truncated", 8)]  # cut to its own training length
    assert [row["length"] for row in rows(whole, "ppl-far-original-yarn-4")] == [64, 128]
    assert rows(whole, "bits-calibrated")[0]["bytes"] == 2 * 300
    assert rows(whole, "pairs-calibrated")[0]["cases"] == 3
    text = (whole / "report" / "tables" / "dropin.md").read_text()
    assert "| Distilled, 4: and longer rows under dynamic NTK | dynamic NTK 4 (" in text
    assert "ppl at 256 (paper 32,768)" in text
    assert "Table 1" not in (whole / "report" / "index.html").read_text()


def test_stages_that_two_recipes_share_are_trained_once(whole: Path) -> None:
    assert sorted(path.name for path in (whole / "runs").iterdir()) == STAGES
    trained = [name for name in states(whole) if name.startswith("finetune")]
    assert trained == [f"finetune {name}" for name in STAGES]
    spent = {name: rows(whole, f"model-{name}")[0]["tokens"] for name in ("calibrated", *STAGES)}
    assert list(spent.values()) == [1024 + 4 * 2 * 16 * stages for stages in (0, 1, 2, 3, 4)]
    first = json.loads((whole / "runs" / "distill-long-4-long" / "model" / "trainer.json").read_text())
    assert first["config"]["run"]["seed"] == 3  # as `farspan finetune` counts its stages


@pytest.mark.usefixtures("no_page")
def test_a_folder_belongs_to_its_recipes_and_not_to_their_names(tmp_path: Path) -> None:
    toml = made(tmp_path)
    reproduce(Preset.load(toml), tmp_path / "out", only=["calibrated"])
    recipe = tmp_path / "long.toml"
    recipe.write_text(recipe.read_text().replace("1e-3", "2e-3"))
    with pytest.raises(ValueError, match="holds a reproduction with other settings"):
        reproduce(Preset.load(toml), tmp_path / "out", only=["calibrated"])


def test_a_checkpoint_with_a_law_of_its_own_is_refused(tmp_path: Path) -> None:
    toml = made(tmp_path)
    config = tmp_path / "llama" / "config.json"
    values = json.loads(config.read_text())
    values["rope_parameters"] = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    config.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="--checkpoint must have plain rotary angles for a study, got pi-4"):
        reproduce(Preset.load(toml), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_law_of_its_own_is_dropped_where_none_is_asked_for(whole: Path) -> None:
    assert rows(whole, "model-distill-long-4-long")[0]["own_scaling"] == "ntk-4"
    plain, own = (rows(whole, f"ppl-far-distill-long-4-long-{law}") for law in ("none", "ntk-4"))
    assert [row["scaling"] for row in plain + own] == ["none", "none", "ntk-4", "ntk-4"]
    assert all(a["nll"] != b["nll"] for a, b in zip(plain, own, strict=True))


def test_the_cache_of_a_converted_model_is_three_quarters_of_the_original_s(whole: Path) -> None:
    original, coca = (rows(whole, f"cache-{name}")[0] for name in ("original", "calibrated"))
    assert original["bytes"] == 2 * 2 * 16 * 16 * 4  # layers, keys and values, width, tokens, float32
    assert coca["bytes"] / original["bytes"] == 0.75


@pytest.mark.usefixtures("no_page")
def test_a_finished_study_is_left_alone(toml: Path, whole: Path) -> None:
    stamps = {path: path.stat().st_mtime_ns for path in (whole / "results").iterdir()}
    reproduce(Preset.load(toml), whole)
    assert {path: path.stat().st_mtime_ns for path in (whole / "results").iterdir()} == stamps


@pytest.mark.usefixtures("no_page")
def test_a_study_stopped_in_training_goes_on_to_the_same_models(
    toml: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = loop._Run.advance, []

    def crash(self: loop._Run, step: int) -> None:
        calls.append(step)
        if len(calls) == 8:  # the last step of the second stage
            raise KeyboardInterrupt
        original(self, step)

    monkeypatch.setattr(loop._Run, "advance", crash)
    with pytest.raises(KeyboardInterrupt):
        reproduce(Preset.load(toml), tmp_path, only=["distill"])
    assert states(tmp_path)["finetune distill-1-attention"] == "done"
    assert states(tmp_path)["finetune distill-2-logits"] == "pending"
    reproduce(Preset.load(toml), tmp_path, only=["distill"])
    assert calls[8:] == [2, 3, 0, 1, 2, 3]  # from the checkpoint after step 2, and then the last stage
    assert set(states(tmp_path).values()) == {"done"}
    assert not (tmp_path / "models" / "original").exists()  # nothing that was not asked for
    for name in STAGES[:3]:
        assert losses(tmp_path / "runs" / name) == losses(whole / "runs" / name)
    assert rows(tmp_path, "ppl-near-distill-3-text-none")[0]["nll"] == pytest.approx(
        rows(whole, "ppl-near-distill-3-text-none")[0]["nll"]
    )


def test_of_two_processes_one_may_be_killed(toml: Path, whole: Path, tmp_path: Path) -> None:
    often = "import farspan.reproduce.run as run; run.POLL_SECONDS = 0.05"
    with ExitStack() as running:
        command = partial(started, "reproduce", "--preset", toml, "--out", tmp_path, before=often)
        both = [running.enter_context(command()) for _ in "ab"]
        deadline = time.monotonic() + 240
        while not (tmp_path / "results" / "model-distill-1-attention.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        both[0].process.kill()
        done = [one.wait() for one in both]
    assert [one.returncode for one in done] == [-signal.SIGKILL, 0], done
    assert set(states(tmp_path).values()) == {"done"}
    assert {p.name for p in (tmp_path / "results").glob("*.json")} == {p.name for p in (whole / "results").iterdir()}
    for name in ("ppl-far-distill-long-4-long-ntk-4", "bits-distill-3-text"):
        for row, expected in zip(rows(tmp_path, name), rows(whole, name), strict=True):
            assert row["nll"] == pytest.approx(expected["nll"])


def test_what_a_killed_conversion_left_is_removed_and_no_more(toml: Path, tmp_path: Path) -> None:
    mine, other = (tmp_path / "models" / f".original{name}-a1b2c3_d.part" for name in ("", "-2"))
    for litter in (mine, other):
        (litter / "whole").mkdir(parents=True)
    step = plan(Preset.load(toml), tmp_path, ["original"])[0]
    StudyWork(Preset.load(toml), tmp_path, lambda what, part: None).do(step)
    assert (tmp_path / "models" / "original" / "config.json").is_file()
    assert not mine.exists()
    assert other.exists()  # of a conversion "original-2", perhaps in another process


def test_a_training_that_becomes_ready_goes_before_what_is_left_to_measure(
    toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def pretend(self: StudyWork, step: Step) -> None:
        seen.append(step.name)
        step.result.parent.mkdir(exist_ok=True)
        step.result.write_text("{}")
        if step.name == "bits original":  # meanwhile the other process has finished the text
            (tmp_path / "data" / "done.json").write_text("{}")

    monkeypatch.setattr(StudyWork, "do", pretend)
    monkeypatch.setattr("farspan.report.write_report", lambda folder: folder)
    (tmp_path / "data").mkdir()
    with claim(tmp_path / "locks" / "data") as mine:
        assert mine
        reproduce(Preset.load(toml), tmp_path)
    assert seen[:4] == ["convert calibrated", "convert original", "cache original", "bits original"]
    assert seen[4:9] == [*(f"finetune {name}" for name in STAGES), "pairs original"]


def test_a_stage_that_fails_leaves_the_rest_going(toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = StudyWork._finetune

    def fails(self: StudyWork, step: Step) -> None:
        if step.model == "distill-2-logits":
            raise RuntimeError("out of memory")
        original(self, step)

    monkeypatch.setattr(StudyWork, "_finetune", fails)
    page = reproduce(Preset.load(toml), tmp_path, only=["distill"])
    found = states(tmp_path)
    assert found["finetune distill-2-logits"] == "failed"
    assert found["finetune distill-3-text"] == found["bits distill-3-text"] == "pending"
    assert found["bits distill-1-attention"] == "done"
    assert "out of memory" in page.read_text()


@pytest.mark.parametrize("name", ["dropin", "dropin-cpu"])
def test_the_shipped_studies_train_their_common_stages_once_and_calibrate_first(name: str, tmp_path: Path) -> None:
    steps = plan(Preset.load(name), tmp_path)
    kinds = [step.kind for step in steps]
    assert steps[0].name == "convert calibrated"
    assert max(i for i, kind in enumerate(kinds) if kind == "finetune") == kinds.index("cache") - 1
    trained = [step.model for step in steps if step.kind == "finetune"]
    assert trained[:4] == STAGES
    first = [name for name in trained if name.endswith("attention")]
    assert first == [f"{run}-1-attention" for run in ("distill", "distill-local", "control-local")]
    laws = {step.scaling for step in steps if step.model == "distill-local-3-text" and step.kind == "passkey"}
    assert laws == {"none"}
    near = {(step.model, step.scaling) for step in steps if step.part == "near"}
    assert ("original", "yarn-4") in near
    assert ("original", "ntk-4") not in near  # the same as none


def test_only_takes_a_run_with_all_it_comes_from(toml: Path, tmp_path: Path) -> None:
    steps = plan(Preset.load(toml), tmp_path, ["distill-long"])
    made = [step.name for step in steps if step.kind in ("convert", "finetune")]
    assert made == ["convert calibrated", *(f"finetune {name}" for name in STAGES)]
    assert not any(step.model == "calibrated" and step.kind == "bits" for step in steps)
    measured = [
        step.model for step in plan(Preset.load("dropin"), tmp_path, ["distill-long"]) if step.kind == "passkey"
    ]
    assert list(dict.fromkeys(measured))[:2] == [
        "distill-long-4-long",
        "distill-3-text",
    ]  # its end, then what it shares
    ends = plan(Preset.load("dropin"), tmp_path, ["distill-long", "calibrated"], ends=True)
    assert {step.model for step in ends if step.kind == "bits"} == {"distill-long-4-long", "calibrated"}
    assert [s.name for s in ends if s.kind == "finetune"] == [s.name for s in steps if s.kind == "finetune"]
    with pytest.raises(ValueError, match="--ends is for a preset with a study, such as dropin"):
        plan(Preset.load("cpu"), tmp_path, ends=True)
    with pytest.raises(ValueError, match=r"--only must name some of original, calibrated, distill, .* got 'table1'"):
        plan(Preset.load(toml), tmp_path, ["table1"])


@pytest.mark.parametrize(
    ("preset", "arguments", "message"),
    [
        ("dropin", [], "--checkpoint must be given for a preset with a study, got none"),
        ("dropin", ["--checkpoint", "{0}/llama"], "--pairs must be given for a preset with a study, got none"),
        (
            "dropin",
            ["--checkpoint", "{0}/llama", "--pairs", "{0}/pairs.jsonl"],
            "--held-out must be given for a preset with a study, got none; try --held-out test.jsonl.xz",
        ),
        (
            "dropin",
            ["--checkpoint", "{0}/nowhere", "--pairs", "{0}/pairs.jsonl", "--held-out", "{0}/test.jsonl"],
            "checkpoint must be a folder or a .gguf file",
        ),
        (
            "dropin",
            ["--checkpoint", "{0}/llama", "--pairs", "{0}/nowhere", "--held-out", "{0}/test.jsonl"],
            "--pairs must be a JSONL file",
        ),
        (
            "dropin-cpu",  # its rows of 128 tokens are too short for a passkey text of bytes
            ["--checkpoint", "{0}/llama", "--pairs", "{0}/pairs.jsonl", "--held-out", "{0}/test.jsonl"],
            "length of stage distill-1-attention must be at least 246 tokens for a passkey text with this tokenizer, "
            "got 128; use longer rows, or passkey_share = 0",
        ),
        (
            "dropin-cpu",
            [
                *("--checkpoint", "{0}/llama", "--pairs", "{0}/pairs.jsonl", "--held-out", "{0}/test.jsonl"),
                *("--only", "original"),
            ],
            "passkey length of study.measures.full must be at least 225 tokens for a passkey prompt with this "
            "tokenizer, got 128; use a longer one",
        ),
        ("dropin", ["--tokenizer", "bpe.json"], "--tokenizer must be left out where a checkpoint brings its own"),
        ("cpu", ["--checkpoint", "x.gguf"], "--checkpoint is for a preset with a study, such as dropin, got 'x.gguf'"),
        ("cosformer-cpu", ["--pairs", "x.jsonl"], "--pairs is for a preset with a study, such as dropin"),
    ],
)
def test_bad_input_exits_2_with_one_line(
    preset: str,
    arguments: list[str],
    message: str,
    toml: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [argument.format(toml.parent) for argument in arguments]
    command = ["farspan", "reproduce", "--preset", preset, *given, "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as stopped:
        farspan_cli.main()
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


CONVERSION = "[study.conversions.a]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[study.runs.x]\nstart = 'a'", "study.runs need a conversion to start from, got none for"),
        (CONVERSION + "[study.runs.x]\nstart = 'b'", "study.runs.x.start must be one of 'a', got 'b'"),
        (CONVERSION + "[study.runs.x]\nstart = 'a'\nrecipe = 'papr'", "--recipe must be one of .* mean 'paper'"),
        (CONVERSION + "measures = 'ful'\n[study.measures.full]", "measures of a must be one of '', 'full', got 'ful'"),
        (CONVERSION + "tokens = 3", "configuration key study.conversions.a.tokens must be one of"),
        (CONVERSION + "scalings = ['ntk4']", "evaluation.scalings must be 'none' or like .* got 'ntk4'"),
        (CONVERSION + "[tasks.listops]", r"tasks must be left out beside \[study\], got \['listops'\]"),
        ("[study.conversions]\na = 3", "study.conversions.a must be a table, got 3"),
        (
            "[study.conversions.x-1-t]\n[study.runs.x]\nstart = 'x-1-t'",
            r"models of a study must have names of their own, got \['x-1-t'\] twice",
        ),
        ("[study.conversions.'a/b']", "names in study must be letters, digits, - and _, got 'a/b'"),
        (CONVERSION + "calibrate_tokens = -5", "calibrate_tokens of a study must be at least 0, got -5"),
        (CONVERSION + "[study.runs.x]\nstart = 'a'\ntokens = -1", "tokens of a study must be at least 0, got -1"),
        ("[study]\nwindow = 0\n" + CONVERSION, "window of a study must be at least 2, got 0"),
        (
            CONVERSION + "[study.measures.m]\nnear = [16]\nfar = [16]",
            r"near and far of study.measures must not share a length, got \[16\]",
        ),
        (CONVERSION + "[study.measures.m]\npasskey = [0]", "lengths in study.measures must be at least 2, got 0"),
        (CONVERSION + "attention = 'coca-exat'", "must be one of .* got 'coca-exat'; did you mean 'coca-exact'"),
    ],
)
def test_a_study_that_cannot_be_meant_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Preset.load(path)
