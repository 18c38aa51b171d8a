"""Objectives equal what they say, and lowering them brings the student to its teacher."""

import pytest
import torch
import torch.nn.functional as F

from farspan.checkpoints.calibrate import attention_rows
from farspan.finetune.objectives import Distillation, new_layers
from tests.finetune.students import student, teacher


def ids(rows: int = 3, length: int = 21) -> torch.Tensor:
    return torch.randint(257, (rows, length))


@pytest.mark.parametrize("attention", ["coca-exact", "coca-slack", "coca-strict", ["rope", "coca-exact", "rope"]])
def test_attention_output_is_the_error_of_each_layer_on_the_teachers_input(attention: object) -> None:
    original = teacher().double()
    model, tokens = student(original, attention), ids()
    hidden, errors = original.model.embed_tokens(tokens[:, :-1]), []
    for ours, theirs in zip(model.model.layers, original.model.layers, strict=True):
        goal = attention_rows(theirs.self_attn, theirs.input_layernorm(hidden))[1]
        if ours.self_attn.spec.kind == "coca":
            made = attention_rows(ours.self_attn, ours.input_layernorm(hidden))[1]
            errors.append((made - goal).pow(2).sum() / goal.pow(2).sum())
        hidden = hidden + goal
        hidden = hidden + theirs.mlp(theirs.post_attention_layernorm(hidden))
    found = Distillation(model, original, {"attention-output": 1.0})(tokens)
    assert found.item() == pytest.approx(torch.stack(errors).mean().item(), rel=1e-12)


def test_a_layers_error_teaches_that_layer_alone() -> None:
    """Were errors passed on, a change of the second layer would change what the first is told."""
    original, tokens, told = teacher(), ids(), []
    model = student(original, ["coca-exact", "coca-exact", "rope"])
    for factor in (1.0, 5.0):
        with torch.no_grad():
            model.model.layers[1].self_attn.v_proj.weight.mul_(factor)
        model.zero_grad()
        Distillation(model, original, {"attention-output": 1.0})(tokens).backward()
        told.append(model.model.layers[0].self_attn.t_proj.weight.grad.clone())
    assert told[0].abs().sum() > 0
    assert torch.equal(*told)
    assert {name.split(".")[2] for name, p in model.named_parameters() if p.grad is not None} == {"0", "1"}


@pytest.mark.parametrize("weights", [{"logit-kl": 1.0}, {"logit-kl": 0.5, "next-token": 2.0}], ids=str)
def test_a_mixture_is_the_sum_of_torchs_losses(weights: dict[str, float]) -> None:
    original = teacher().double()
    model, tokens = student(original), ids()
    ours, theirs = (F.log_softmax(m(tokens[:, :-1]).logits.flatten(0, 1), -1) for m in (model, original))
    goal = weights.get("logit-kl", 0.0) * F.kl_div(ours, theirs, log_target=True, reduction="batchmean")
    goal = goal + weights.get("next-token", 0.0) * F.nll_loss(ours, tokens[:, 1:].flatten())
    assert Distillation(model, original, weights)(tokens).item() == pytest.approx(goal.item(), rel=1e-12)


@pytest.mark.parametrize("weights", [{"attention-output": 1.0}, {"logit-kl": 1.0, "next-token": 0.5}])
def test_autocast_changes_only_rounding(weights: dict[str, float]) -> None:
    original = teacher()
    model, tokens = student(original), ids()
    objective = Distillation(model, original, weights)
    found = []
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = objective(tokens)
        loss.backward()
        found.append((loss.item(), model.model.layers[0].self_attn.t_proj.weight.grad.clone()))
    (exact, gradient), (rounded, narrow) = found
    assert rounded == pytest.approx(exact, rel=2e-2)
    assert (narrow - gradient).norm() <= 0.1 * gradient.norm()


def test_the_teacher_is_no_part_of_the_module() -> None:
    original = teacher()
    model = student(original)
    objective = Distillation(model, original, {"logit-kl": 1.0})
    assert {p.data_ptr() for p in objective.parameters()} == {p.data_ptr() for p in model.parameters()}
    objective(ids()).backward()
    assert all(p.grad is None for p in original.parameters())
    assert new_layers(model.config, original.config) == [0, 1, 2]
    assert new_layers(original.config, original.config) == []


def test_a_teacher_must_have_the_students_shape_and_other_layers() -> None:
    with pytest.raises(ValueError, match=r"the model's num_hidden_layers = 3, got 2; name what"):
        Distillation(student(teacher()), teacher(num_hidden_layers=2), {"logit-kl": 1.0})
    with pytest.raises(ValueError, match=r"'attention-output' needs layers that were changed.*convert the model first"):
        Distillation(teacher(), teacher(), {"attention-output": 1.0})


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"attention-output": 5.0}, "weights must be one of weight 1"),
        ({"attention-output": 1.0, "logit-kl": 1.0}, "weights must be one of weight 1"),
        ({"next-token": 1.0}, "an objective that needs the teacher"),
        ({}, "weights must be one of weight 1"),
        ({"logits": 1.0}, "weights must be one of"),
    ],
    ids=str,
)
def test_weights_that_cannot_be_lowered_together(weights: dict[str, float], message: str) -> None:
    original = teacher()
    with pytest.raises(ValueError, match=message):
        Distillation(student(original), original, weights)
