"""A recipe's log_length belongs to its finished model."""

from dataclasses import replace
from pathlib import Path

import pytest

from farspan import FarspanForCausalLM
from farspan.finetune import finetune
from tests.finetune.folders import recipe

PLAIN = recipe({"objective": {"logit-kl": 1.0}})


@pytest.mark.parametrize("first", [False, True])
def test_a_finished_model_is_not_taken_for_one_of_the_other_kind(
    first: bool, folders: tuple[Path, Path, str], tmp_path: Path
) -> None:
    _, coca, source = folders
    done = finetune(coca, {source: 1.0}, replace(PLAIN, log_length=first), tmp_path / "run")
    assert FarspanForCausalLM.from_pretrained(done).config.log_length == first
    with pytest.raises(ValueError, match=rf"a finished model with log_length {first} and not {not first}"):
        finetune(coca, {source: 1.0}, replace(PLAIN, log_length=not first), tmp_path / "run")
    assert finetune(coca, {source: 1.0}, replace(PLAIN, log_length=first), tmp_path / "run") == done
