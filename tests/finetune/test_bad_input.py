"""What no recipe can mean: one clear line before anything is trained."""

from pathlib import Path

import pytest

from farspan.data import prepare
from farspan.finetune import finetune
from farspan.utils import lock
from tests.finetune.folders import Folders, recipe

TEACHER = {"objective": {"logit-kl": 1.0}}


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ({"train": ["*.k_proj.*"]}, r"train of stage s1 must name parameters, got '\*.k_proj.\*', which fits none"),
        ({"length": 10_000_000}, "length must be below the tokens available, got 10000000"),
        (
            {"rope_parameters": {"rope_type": "linear"}},
            "rope_parameters of stage s1 need a factor > 1, got 0.5 for length 16 and a model trained at 32",
        ),
        ({"passkey_share": 0.02, "retrieval_share": 0.1}, "share of stage s1 must be 0 with retrieval_share, got 0.02"),
        ({"passkey_share": 0.02}, "length of stage s1 must be at least 246 tokens .* got 16; use longer rows"),
    ],
)
def test_a_bad_later_stage_is_found_before_the_first_is_trained(
    later: dict, message: str, folders: Folders, tmp_path: Path
) -> None:
    _, coca, source = folders
    with pytest.raises(ValueError, match=message):
        finetune(coca, {source: 1.0}, recipe({}, later), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model", "stage", "teacher", "message"),
    [
        ("gone", {}, None, r"checkpoint must be a folder or a .gguf file, got '.*gone', which does not"),
        ("original", TEACHER, None, r"--teacher is needed by stage s0, got none, and .* does not say"),
        ("coca", TEACHER, "gone", r"--teacher must exist, got '.*gone'"),
        ("coca", {}, "original", r"--teacher must be left out for a recipe that learns from tokens alone"),
    ],
)
def test_a_model_and_its_teacher_must_be_there(
    model: str, stage: dict, teacher: str | None, message: str, folders: Folders, tmp_path: Path
) -> None:
    original, coca, source = folders
    paths = {None: None, "original": original, "coca": coca, "gone": tmp_path / "gone"}
    with pytest.raises(ValueError, match=message):
        finetune(paths[model], {source: 1.0}, recipe(stage), tmp_path / "out", teacher=paths[teacher])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("weight", [-1.0, 0.0, float("nan"), float("inf")])
def test_weights_of_data_must_be_positive(weight: float, folders: Folders, tmp_path: Path) -> None:
    _, coca, source = folders
    with pytest.raises(ValueError, match=r"data\.sources.* must be"):
        finetune(coca, {source: weight}, recipe({}), tmp_path / "out")
    with pytest.raises(ValueError, match="data must name at least one token folder, got none"):
        finetune(coca, {}, recipe({}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_data_of_another_tokenizer(folders: Folders, tmp_path: Path) -> None:
    coca = folders[1]
    text = tmp_path / "text.txt"
    text.write_text("some words to make tokens of\n" * 500)
    prepare([str(text)], str(tmp_path / "other"), tokenizer=300, valid_share=0.0)
    with pytest.raises(ValueError, match=r"--data must be made with the model's tokenizer, got another in"):
        finetune(coca, {str(tmp_path / "other"): 1.0}, recipe({}), tmp_path / "out")


def test_a_folder_of_something_else_and_one_in_use_are_left_alone(folders: Folders, tmp_path: Path) -> None:
    original, coca, source = folders
    for folder in (coca, Path(source), original.parent, Path("/")):
        before = sorted(folder.iterdir())
        with pytest.raises(
            ValueError, match=r"out must be a new folder or one of a fine-tuning, got .*; choose another"
        ):
            finetune(coca, {source: 1.0}, recipe({}), folder)
        assert sorted(folder.iterdir()) == before
    with lock(tmp_path / "out"), pytest.raises(ValueError, match="another process works in"):
        finetune(coca, {source: 1.0}, recipe({}), tmp_path / "out")
