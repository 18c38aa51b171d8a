"""Recipes are data: the shipped ones say what was published, and a bad one is named."""

import tomllib
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from farspan.finetune import Recipe
from farspan.finetune.recipe import FEWEST_STEPS, NAMES


@pytest.mark.parametrize("name", NAMES)
def test_shipped_recipes_load_and_scale(name: str) -> None:
    whole = Recipe.load(name)
    assert whole.description
    assert name not in ("distill", "hybrid") or whole.tokens <= 100_000_000
    assert whole.scaled(whole.tokens) == whole
    assert whole.scaled(3 * whole.tokens).stages[0].optimizer.steps == 3 * whole.stages[0].optimizer.steps
    small = whole.scaled(20_000_000)
    assert [s.name for s in small.stages] == [s.name for s in whole.stages]
    assert sum(s.tokens for s in small.stages) == pytest.approx(20_000_000, rel=0.05)
    for stage, before in zip(small.stages, whole.stages, strict=True):
        assert stage.batch_size == 1 or stage.optimizer.steps >= min(before.optimizer.steps, FEWEST_STEPS) - 1


def test_the_published_schedule_is_the_papers() -> None:
    stages = Recipe.load("paper").stages
    assert [s.optimizer.steps * s.batch_size * s.length for s in stages] == [15_000 * 32 * 8 * 2048] * 3
    assert all(s.objective == {"next-token": 1.0} for s in stages)
    assert stages[0].train_length == 2048


def test_far_positions_come_after_distillation_and_their_control_has_the_same_stage() -> None:
    distill, skip, control = (Recipe.load(name).stages for name in ("distill", "distill-skip", "long-skip"))
    assert skip[:3] == distill
    assert replace(control[0], train_length=0) == skip[2]
    assert control[1:] == skip[3:]
    assert [stage.length * stage.reach for stage in skip[3:]] == [32_768]
    assert max(stage.length for stage in skip) == 2048
    assert Recipe.load("distill-skip").capped(64).stages[3].reach == 16
    assert all(Recipe.load(name).scaled(10**6).log_length for name in ("distill-skip", "long-skip"))


def test_a_small_budget_keeps_the_shares_and_at_least_a_row() -> None:
    small = Recipe.load("distill").capped(64).scaled(64 * 40)
    assert [s.length for s in small.stages] == [64] * 3
    assert small.stages[0].train_length == 64
    assert [s.batch_size for s in small.stages] == [1] * 3
    assert [s.optimizer.steps for s in small.stages] == [8, 24, 8]
    assert all(s.optimizer.steps == 1 for s in Recipe.load("distill").scaled(1).stages)


def test_the_recipe_in_the_documentation_is_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "finetuning.md").read_text().split("## Write a recipe")[1]
    block = [line for line in text.split("- `log_length =")[0].splitlines() if line.startswith("    ")]
    stages = Recipe.parse(tomllib.loads(dedent("\n".join(block)))).stages
    assert [stage.name for stage in stages] == ["attention", "long"]


BAD = {
    "": "configuration key stages must be given",
    "stage = 1": "configuration key stage must be one of .*did you mean 'stages'",
    "[[stages]]\nname = 'a/b'": r"stages\[0\].name must match pattern",
    "log_length = 2048\n[[stages]]\nname = 'a'": "log_length must be a valid boolean, got 2048",
    "[[stages]]\nname = 'a'\n[[stages]]\nname = 'a'": "names of their own",
    "[[stages]\n": "--recipe .* is not valid TOML",
    **{
        f"[[stages]]\nname = 'a'\n{line}": message
        for line, message in {
            "lenght = 5": r"key stages\[0\].lenght .*did you mean 'length'",
            "optimizer = { step = 5 }": r"stages\[0\].optimizer.step .*did you mean 'steps'",
            "objective = { logits-kl = 1.0 }": "objective of stage a .*did you mean 'logit-kl'",
            "objective = { logit-kl = 0 }": "logit-kl must be greater than 0, got 0",
            "objective = { next-token = inf }": "must be a finite number",
            "objective = { next-token = 0.5 }": "objective of stage a must be one of weight 1, .* 0.5}",
            "objective = { logit-kl = 1.0, attention-output = 1.0 }": "must be one of weight 1, or logit-kl with or",
            "objective = {}": "objective must have at least 1 item",
            "train = []": "train must have at least 1 item",
            "passkey_share = 0.2": "passkey_share must be less than or equal to 0.05, got 0.2",
            "batch_size = 3": "multiple of optimizer.accumulation = 2, got 3",
            "reach = 3": "reach of stage a must be a power of two, .* got 3 times 2048; try 16",
            "reach = 2\nlength = 17": "reach of stage a must be .* with rows of even length .* got 2 times 17",
            "rope_parameters = { rope_type = 'lin' }": "rope_type must be 'linear' or 'dynamic', got 'lin'",
            "rope_parameters = { rope_type = 'linear', factor = 2 }": "none for 'linear', got 2.0",
            "rope_parameters = { rope_type = 'dynamic' }": "must have a factor for 'dynamic'",
        }.items()
    },
}


@pytest.mark.parametrize(("text", "message"), BAD.items(), ids=range(len(BAD)))
def test_bad_recipes_get_one_clear_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        Recipe.load(path)
    assert "\n" not in str(raised.value)
