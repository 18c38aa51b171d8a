"""A recipe run for real, at toy size: what moves, what does not, what is left when it is stopped."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from farspan import FarspanForCausalLM
from farspan.checkpoints import read_note
from farspan.convert import convert_folder, from_pretrained
from farspan.finetune import Distillation, Recipe, finetune
from farspan.training.config import RunSection
from tests.finetune.folders import FAR_UNDER_NTK, Folders, recipe, weights
from tests.helpers import losses
from tests.training.runs import PowerCutError, cut_at

DISTIL = recipe(
    {"objective": {"attention-output": 1.0}, "train": ["*.self_attn.*"]},
    {"objective": {"logit-kl": 1.0}},
    {"objective": {"logit-kl": 0.5, "next-token": 0.5}},
)


@pytest.fixture(scope="module")
def whole(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Distilled without interruption."""
    _, coca, source = folders
    out = tmp_path_factory.mktemp("whole") / "run"
    finetune(coca, {source: 1.0}, DISTIL, out)
    return out


def test_distilling_lowers_every_loss_and_comes_near_the_original(folders: Folders, tmp_path: Path) -> None:
    original, coca, source = folders
    steps = {"steps": 40, "peak_lr": 3e-3, "end_lr": 3e-4, "weight_decay": 0.0, "accumulation": 1}
    common = {"length": 32, "batch_size": 8, "optimizer": steps}
    longer = recipe({"objective": {"attention-output": 1.0}, **common}, {"objective": {"logit-kl": 1.0}, **common})
    done = finetune(coca, {source: 1.0}, longer, tmp_path / "out")
    for stage in ("stage-1-s0", "stage-2-s1"):
        curve = losses(tmp_path / "out" / stage)
        assert sum(curve[-5:]) < 0.7 * sum(curve[:5])
    text = torch.tensor([[byte + 1 for byte in b"6001 times 6001 is 36012001, and so it goes.\n"]])
    teacher = from_pretrained(original)
    with torch.no_grad():
        far, near = (
            Distillation(from_pretrained(path, attention=None), teacher, {"logit-kl": 1.0})(text)
            for path in (coca, done)
        )
    assert near < 0.5 * far


def test_a_recipe_leaves_models_and_an_account(whole: Path, folders: Folders) -> None:
    original, coca, _ = folders
    stages = {"stage-1-s0", "stage-2-s1", "stage-3-s2"}
    assert {p.name for p in whole.iterdir()} == {*stages, "model", "recipe.json", "finetune.json", ".lock"}
    assert (whole / "model" / "tokenizer.json").read_bytes() == (coca / "tokenizer.json").read_bytes()
    FarspanForCausalLM.from_pretrained(whole / "model")
    assert read_note(coca) == read_note(whole / "model") == original
    rows = json.loads((whole / "recipe.json").read_text())["rows"]
    assert [row["tokens"] for row in rows] == [8 * 4 * 16] * 3
    assert all(row["seconds"] > 0 for row in rows)
    assert rows[0]["trained_parameters"] < rows[0]["parameters"] == rows[1]["trained_parameters"]


def test_frozen_parameters_are_bit_identical_after_a_stage(whole: Path, folders: Folders) -> None:
    before, after = weights(folders[1]), weights(whole / "stage-1-s0" / "model")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]) == (".self_attn." not in name), name


@pytest.mark.parametrize("key", ["t_proj", "k_proj"])
def test_the_published_stages_move_what_the_paper_says(key: str, folders: Folders, tmp_path: Path) -> None:
    """Also of the original itself, which is the control: the same text without CoCA."""
    original, coca, source = folders
    path = coca if key == "t_proj" else original
    finetune(path, {source: 1.0}, Recipe.load("paper").capped(16).scaled(16 * 12), tmp_path / "out")
    moved = []
    for name in ("stage-1-t", "stage-2-qkv", "stage-3-all"):
        before, path = weights(path), tmp_path / "out" / name / "model"
        after = weights(path)
        moved.append({name.split(".")[-2] for name in after if not torch.equal(before[name], after[name])})
    assert moved[0] == {key}
    assert moved[1] == {"q_proj", key, "v_proj"}
    assert {"embed_tokens", "down_proj", "input_layernorm", "o_proj", key} <= moved[2]


def test_a_recipe_stopped_anywhere_goes_on_to_the_same_model(whole: Path, folders: Folders, tmp_path: Path) -> None:
    _, coca, source = folders
    often = RunSection(checkpoint_every=3)
    with cut_at(5, 14, 25):
        for _ in range(3):
            with pytest.raises(PowerCutError):
                finetune(coca, {source: 1.0}, DISTIL, tmp_path / "run", run=often)
        finetune(coca, {source: 1.0}, DISTIL, tmp_path / "run", run=often)
    for stage in ("stage-1-s0", "stage-2-s1", "stage-3-s2"):
        assert losses(tmp_path / "run" / stage) == losses(whole / stage)
    ours, theirs = weights(tmp_path / "run" / "model"), weights(whole / "model")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_finished_recipe_is_not_repeated_and_progress_counts_the_tokens_of_all_stages(
    whole: Path, folders: Folders, tmp_path: Path
) -> None:
    _, coca, source = folders
    before = (whole / "model" / "model.safetensors").stat().st_mtime_ns
    reports: list[tuple[float, float | None, str]] = []
    report = lambda *now, **_: reports.append(now)  # noqa: E731
    assert finetune(coca, {f"{source}/": 1.0}, DISTIL, whole, progress=report) == whole / "model"
    assert (whole / "model" / "model.safetensors").stat().st_mtime_ns == before
    assert not reports
    two = recipe({}, {"length": 8})
    finetune(coca, {source: 1.0}, two, tmp_path / "out", progress=report)
    assert [now[:2] for now in reports] == [(8 * 4 * 16, two.tokens), (two.tokens, two.tokens)]
    assert [now[2].split(",")[0] for now in reports] == ["s0: step 8", "s1: step 8"]


def test_a_folder_holds_one_recipe(whole: Path, folders: Folders) -> None:
    _, coca, source = folders
    more = Recipe((*DISTIL.stages, recipe({"name": "more"}).stages[0]))
    for other, message in (
        (
            DISTIL.capped(12),
            r"^this run in '.*stage-1-s0' began with stage.length = 16, got 12; keep it or use",
        ),
        (DISTIL.scaled(round(0.43 * DISTIL.tokens)), r"began with stage.batch_size = 4, got 1; stage.optimizer.steps"),
        (more, r"this fine-tuning began with stages = .*, got .*stage-4-more"),
        (Recipe(DISTIL.stages[:2]), r"this fine-tuning began with stages = .*stage-3-s2'\], got"),
        (replace(DISTIL, log_length=True), r"this fine-tuning began with log_length = False, got True; keep it"),
    ):
        with pytest.raises(ValueError, match=message):
            finetune(coca, {source: 1.0}, other, whole)


STAGES = {
    "far positions": FAR_UNDER_NTK,
    # The temperature of a hybrid follows the length, in a new model as in one from a checkpoint.
    "longer hybrid": {"length": 64, "train_length": 64, "rope_parameters": {"rope_type": "linear"}},
}


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_goes_on_where_it_stopped(name: str, folders: Folders, tmp_path: Path) -> None:
    original, model, source = folders
    if name == "longer hybrid":
        model = tmp_path / "hybrid"
        convert_folder(original, model, "hybrid-rope", window=8, global_every=2)
    stages, often = recipe(STAGES[name]), RunSection(checkpoint_every=3)
    whole = finetune(model, {source: 1.0}, stages, tmp_path / "whole", run=often)
    with cut_at(5), pytest.raises(PowerCutError):
        finetune(model, {source: 1.0}, stages, tmp_path / "cut", run=often)
    cut = finetune(model, {source: 1.0}, stages, tmp_path / "cut", run=often)
    assert losses(tmp_path / "cut" / "stage-1-s0") == losses(tmp_path / "whole" / "stage-1-s0")
    ours, theirs = weights(cut), weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
