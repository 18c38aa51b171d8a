"""What no recipe can mean: refused in one line, before anything is trained."""

from pathlib import Path

import pytest

from farspan.data import prepare
from farspan.finetune import finetune, open_origin
from tests.finetune.folders import recipe


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ({"train": ["*.k_proj.*"]}, r"train of stage s1 must name parameters, got '\*.k_proj.\*'"),
        ({"length": 10_000_000}, "length must be below the tokens available, got 10000000"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters of stage s1 need a factor > 1, got 0.5"),
        (
            {"passkey_share": 0.02},
            "length of stage s1 must be at least 246 tokens .* got 16; use longer rows",
        ),
        ({"lora": {"r": 2, "target_modules": ["k_proj"]}}, "lora.target_modules must be linear layers .*got 'k_proj'"),
        ({"lora": {"r": 2, "target_modules": ["lm_head"]}}, "lora.target_modules must be .*got 'lm_head'"),
    ],
)
def test_a_bad_later_stage_is_refused_before_the_first_is_trained(
    later: dict, message: str, folders: tuple[Path, Path, str], tmp_path: Path
) -> None:
    _, coca, source = folders
    with pytest.raises(ValueError, match=message):
        finetune(coca, {source: 1.0}, recipe({}, later), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_meant_is_refused(folders: tuple[Path, Path, str], tmp_path: Path) -> None:
    original, coca, source = folders
    out = tmp_path / "out"
    with pytest.raises(
        ValueError, match=r"train of stage s0 must name parameters, got '\*.k_proj.\*', which fits none"
    ):
        finetune(coca, {source: 1.0}, recipe({"train": ["*.k_proj.*"]}), out)
    with pytest.raises(ValueError, match=r"checkpoint must be a folder or a .gguf file, got '.*gone', which does not"):
        finetune(tmp_path / "gone", {source: 1.0}, recipe({}), out)
    with pytest.raises(ValueError, match=r"--teacher is needed by stage s0, got none, and .* does not say"):
        finetune(original, {source: 1.0}, recipe({"objective": {"logit-kl": 1.0}}), out)
    with pytest.raises(ValueError, match=r"--teacher must exist, got '.*gone'"):
        finetune(coca, {source: 1.0}, recipe({"objective": {"logit-kl": 1.0}}), out, teacher=tmp_path / "gone")
    with pytest.raises(ValueError, match=r"--teacher must be left out for a recipe .* text alone, got '.*model'"):
        finetune(coca, {source: 1.0}, recipe({}), out, teacher=original)
    with pytest.raises(ValueError, match=r"--teacher must be left out .* got '.*gone'"):
        finetune(coca, {source: 1.0}, recipe({}), out, teacher=tmp_path / "gone")
    with pytest.raises(ValueError, match=r"--teacher must exist, got '.*gone'"):
        open_origin(coca, {source: 1.0}, recipe({}), teacher=tmp_path / "gone")
    with pytest.raises(ValueError, match=r"factor > 1, got 0.5 for length 16 and a model trained at 32"):
        finetune(coca, {source: 1.0}, recipe({"rope_parameters": {"rope_type": "linear"}}), out)
    with pytest.raises(ValueError, match=r"lora.target_modules must be linear layers .*got 'k_proj'"):
        finetune(coca, {source: 1.0}, recipe({"lora": {"r": 2, "target_modules": ["k_proj"]}}), out)
    text = tmp_path / "text.txt"
    text.write_text("some words to make tokens of\n" * 500)
    prepare([str(text)], str(tmp_path / "other"), tokenizer=300, valid_share=0.0, workers=1)
    with pytest.raises(ValueError, match=r"--data must be made with the model's tokenizer, got another in"):
        finetune(coca, {str(tmp_path / "other"): 1.0}, recipe({}), out)
