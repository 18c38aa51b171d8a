"""A drop-in study runs end to end, shares what its runs have in common, and goes on after any interruption."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

import farspan.training.loop as loop
from farspan.reproduce import Preset, reproduce
from farspan.reproduce.steps import plan
from tests.command_line import refusal
from tests.helpers import losses
from tests.reproduce.checkpoints import made


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def whole(toml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study without interruption."""
    out = tmp_path_factory.mktemp("whole")
    assert reproduce(Preset.load(toml), out).failed == []
    return out


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "results" / f"{name}.json").read_text())["rows"]
    return found


def test_every_model_is_made_and_measured_and_shown(toml: Path, whole: Path) -> None:
    assert all(step.result.exists() for step in plan(Preset.load(toml), whole))
    windows = [(row["length"], row["mode"], row["stride"]) for row in rows(whole, "ppl-original-none")]
    assert windows == [(16, "sliding", 8), (32, "truncated", 8)]  # cut to its own training length
    far = rows(whole, "ppl-original-yarn-4-from-64")
    assert [(row["length"], row["mode"], row["stride"]) for row in far] == [(64, "sliding", 32), (128, "sliding", 32)]
    assert not (whole / "results" / "ppl-distill-long-dynamic_ntk-4.json").exists()  # the same as none
    assert rows(whole, "bits-calibrated")[0]["bytes"] == 2 * 300
    assert rows(whole, "pairs-calibrated")[0]["cases"] == 3
    assert "CoCA, calibrated" in (whole / "report" / "tables" / "dropin.md").read_text()


def test_a_model_says_what_it_and_those_before_it_took(whole: Path) -> None:
    models = {name: rows(whole, f"model-{name}")[0] for name in ("calibrated", "distill", "distill-long")}
    assert [model["tokens"] for model in models.values()] == [1024 + 4 * 2 * 16 * stages for stages in (0, 3, 4)]
    assert [model["stages"] for model in models.values()] == [0, 3, 4]
    assert models["calibrated"]["seconds"] < models["distill"]["seconds"]
    last = whole / "runs" / "distill-long" / "stage-4-long"
    assert json.loads((last / "model" / "trainer.json").read_text())["config"]["run"]["seed"] == 3


@pytest.mark.usefixtures("no_page")
def test_a_folder_belongs_to_its_recipes_and_not_to_their_names(tmp_path: Path) -> None:
    toml = made(tmp_path)
    reproduce(Preset.load(toml), tmp_path / "out", only=["convert", "original"])
    recipe = tmp_path / "long.toml"
    recipe.write_text(recipe.read_text().replace("1e-3", "2e-3"))
    with pytest.raises(ValueError, match="this reproduction began with recipes"):
        reproduce(Preset.load(toml), tmp_path / "out")


@pytest.mark.usefixtures("no_page")
def test_a_model_says_what_rows_showed_it_in_any_stage(tmp_path: Path) -> None:
    """Also in one before the last."""
    toml = made(tmp_path)
    first, rest = (tmp_path / "distill.toml").read_text().split("train_length = 16", 1)
    first = first.replace("length = 16", "length = 800\nretrieval_share = 0.05")
    (tmp_path / "distill.toml").write_text(f"{first}train_length = 16{rest}")
    assert not reproduce(Preset.load(toml), tmp_path / "out", only=["finetune", "distill"]).failed
    shares = ("passkey_share", "retrieval_share")
    found = [[rows(tmp_path / "out", f"model-{name}")[0][x] for x in shares] for name in ("calibrated", "distill")]
    assert found == [[0.0, 0.0], [0.0, 0.05]]


def test_a_scaling_of_its_own_is_dropped_where_none_is_asked_for(whole: Path) -> None:
    assert rows(whole, "model-distill-long")[0]["own_scaling"] == "dynamic_ntk-4"
    plain, own = (rows(whole, f"ppl-distill-long-{name}-from-64") for name in ("none", "dynamic_ntk-4"))
    assert [row["scaling"] for row in plain + own] == ["none", "none", "dynamic_ntk-4", "dynamic_ntk-4"]
    assert all(a["nll"] != b["nll"] for a, b in zip(plain, own, strict=True))


def test_the_cache_of_a_converted_model_is_three_quarters_of_the_original_s(whole: Path) -> None:
    original, coca = (rows(whole, f"cache-{name}")[0] for name in ("original", "calibrated"))
    assert original["bytes"] == 2 * 2 * 16 * 16 * 4  # layers, keys and values, width, tokens, float32
    assert coca["bytes"] / original["bytes"] == 0.75


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
    only = ["distill", "ppl"]
    with pytest.raises(KeyboardInterrupt):
        reproduce(Preset.load(toml), tmp_path, only=only)
    assert not (tmp_path / "results" / "model-distill.json").exists()
    assert reproduce(Preset.load(toml), tmp_path, only=only).failed == []
    assert calls[8:] == [2, 3, 0, 1, 2, 3]  # from the checkpoint after step 2, and then the last stage
    assert not (tmp_path / "models" / "original").exists()  # nothing that was not asked for
    for stage in ("stage-1-attention", "stage-2-logits", "stage-3-text"):
        assert losses(tmp_path / "runs" / "distill" / stage) == losses(whole / "runs" / "distill" / stage)
    assert rows(tmp_path, "ppl-distill-none") == rows(whole, "ppl-distill-none")


@pytest.mark.parametrize("name", ["dropin", "dropin-cpu"])
def test_the_shipped_studies_make_every_model_first(name: str, tmp_path: Path) -> None:
    steps = plan(Preset.load(name), tmp_path)
    kinds, names = [step.kind for step in steps], {step.name for step in steps}
    assert kinds[1:4] == ["convert"] * 3  # the longest, with calibration
    assert max(i for i, kind in enumerate(kinds) if kind == "finetune") == kinds.index("cache") - 1
    assert "ppl original yarn-4" in names
    assert "ppl original dynamic_ntk-4" not in names  # the same as none
    assert not any("distilled-rope dynamic" in name for name in names)
    some = [step.name for step in plan(Preset.load(name), tmp_path, ["distill-skip-4-skip", "bits"])]
    assert some == ["tokens source-0", "convert calibrated", "finetune distill-skip-4-skip", "bits distill-skip-4-skip"]


GIVEN = {"checkpoint": "llama", "pairs": "pairs.jsonl", "held-out": "test.jsonl"}


@pytest.mark.parametrize(
    ("preset", "changed", "message"),
    [
        ("dropin", {"checkpoint": ""}, "--checkpoint must be given for a preset that converts, got none"),
        ("dropin", {"pairs": ""}, "--pairs must be given for a preset that converts, got none"),
        ("dropin", {"held-out": ""}, "--held-out must be given for a preset that converts, got none; try --held-out"),
        ("dropin", {"checkpoint": "nowhere"}, "checkpoint must be a folder or a .gguf file"),
        ("dropin", {"checkpoint": "scaled"}, "--checkpoint must have plain rotary angles, got linear-4"),
        ("dropin", {"pairs": "nowhere"}, "--pairs must be a JSONL file"),
        ("dropin-cpu", {}, "--held-out must have a document of at least 2048 tokens"),
        ("dropin-cpu", {"held-out": "long.txt"}, "passkey length of original must be at least 2"),
        ("dropin", {"tokenizer": "bpe.json"}, "--tokenizer must be left out where a checkpoint brings its own"),
        ("cpu", {"pairs": ""}, "--checkpoint is for a preset that converts, such as dropin, got"),
        ("cosformer-cpu", {"checkpoint": ""}, "--pairs is for a preset that converts, such as dropin"),
    ],
)
def test_bad_input_exits_2_with_one_line(
    preset: str, changed: dict[str, str], message: str, toml: Path, tmp_path: Path
) -> None:
    folder = toml.parent
    if not (folder / "scaled").exists():
        copytree(folder / "llama", folder / "scaled")
        config = json.loads((folder / "scaled" / "config.json").read_text())
        config["rope_parameters"] = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
        (folder / "scaled" / "config.json").write_text(json.dumps(config))
        (folder / "long.txt").write_text("some words " * 1000)
    given = [f"--{name}={folder / value}" for name, value in {**GIVEN, **changed}.items() if value]
    assert message in refusal("reproduce", "--preset", preset, *given, "--out", "out", cwd=tmp_path)
