"""A recipe's log_length belongs to its finished model."""

from dataclasses import replace
from pathlib import Path

import pytest

from farspan.finetune import finetune
from farspan.models import FarspanForCausalLM
from tests.finetune.folders import made, recipe

PLAIN = recipe({"objective": {"logit-kl": 1.0}})


def test_a_finished_model_without_it_is_not_taken_for_one_with_it(tmp_path: Path) -> None:
    _, coca, source = made(tmp_path)
    done = finetune(coca, {source: 1.0}, PLAIN, tmp_path / "run")
    with pytest.raises(ValueError, match=r"holds a finished model without the recipe's log_length; choose another"):
        finetune(coca, {source: 1.0}, replace(PLAIN, log_length=True), tmp_path / "run")
    model = FarspanForCausalLM.from_pretrained(done)
    model.set_log_length(True)
    model.save_pretrained(done)
    assert finetune(coca, {source: 1.0}, replace(PLAIN, log_length=True), tmp_path / "run") == done
