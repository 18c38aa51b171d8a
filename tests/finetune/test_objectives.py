"""Objectives equal what they say, and lowering them brings the student to its teacher."""

import pytest
import torch
import torch.nn.functional as F

from farspan.convert.fit import attention_rows
from farspan.finetune.objectives import Distillation, new_layers
from farspan.training.pretraining import NextToken
from tests.finetune.students import student, teacher


def ids(rows: int = 3, length: int = 21) -> torch.Tensor:
    return torch.randint(257, (rows, length))


@pytest.mark.parametrize("attention", ["coca-exact", "coca-slack", "coca-strict", ["rope", "coca-exact", "rope"]])
def test_attention_output_is_the_error_of_each_layer_on_the_teachers_input(attention: object) -> None:
    original = teacher().double()
    model, tokens = student(original, attention), ids()
    hidden, errors = original.model.embed_tokens(tokens[:, :-1]), []
    for ours, theirs in zip(model.model.layers, original.model.layers, strict=True):
        goal = attention_rows(theirs.self_attn, theirs.input_layernorm(hidden)).output
        if ours.self_attn.spec.kind == "coca":
            made = attention_rows(ours.self_attn, ours.input_layernorm(hidden)).output
            errors.append((made - goal).pow(2).sum() / goal.pow(2).sum())
        hidden = hidden + goal
        hidden = hidden + theirs.mlp(theirs.post_attention_layernorm(hidden))
    found = Distillation(model, original, {"attention-output": 2.0})(tokens)
    assert found.item() == pytest.approx(2 * torch.stack(errors).mean().item(), rel=1e-12)


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


def test_a_text_as_short_as_a_decoding_step_teaches_too() -> None:
    """The half-width kernel, which would take so few tokens, has no gradients."""
    original, tokens, told = teacher(), ids(1, 4), []
    model = student(original)
    for backend in ("sdpa", "triton"):
        model.config.decode_backend = backend
        model.zero_grad()
        Distillation(model, original, {"attention-output": 1.0})(tokens).backward()
        told.append(model.model.layers[0].self_attn.t_proj.weight.grad.clone())
    assert told[0].abs().sum() > 0
    assert torch.equal(*told)


@pytest.mark.parametrize("weights", [{"logit-kl": 1.0}, {"logit-kl": 0.5, "next-token": 2.0}])
def test_logit_kl_is_torchs_between_the_two_models(weights: dict[str, float]) -> None:
    original = teacher().double()
    model, tokens = student(original), ids()
    ours, theirs = (F.log_softmax(m(tokens[:, :-1]).logits.flatten(0, 1), -1) for m in (model, original))
    goal = weights["logit-kl"] * F.kl_div(ours, theirs, log_target=True, reduction="batchmean")
    goal = goal + weights.get("next-token", 0.0) * F.nll_loss(ours, tokens[:, 1:].flatten())
    assert Distillation(model, original, weights)(tokens).item() == pytest.approx(goal.item(), rel=1e-12)


@pytest.mark.parametrize("other", ["logit-kl", "next-token"])
def test_mixtures_add_up(other: str) -> None:
    original = teacher().double()
    model, tokens = student(original), ids()
    local = Distillation(model, original, {"attention-output": 1.0})(tokens)
    alone = NextToken(model) if other == "next-token" else Distillation(model, original, {other: 1.0})
    both = Distillation(model, original, {"attention-output": 0.5, other: 3.0})(tokens)
    assert both.item() == pytest.approx((0.5 * local + 3 * alone(tokens)).item(), rel=1e-12)


@pytest.mark.parametrize("name", ["attention-output", "logit-kl"])
def test_lowering_an_objective_brings_the_student_to_the_teacher(name: str) -> None:
    """Also past 512 tokens, and with the other distance measured on text it was not lowered on."""
    original = teacher()
    model = student(original)
    objective, held = Distillation(model, original, {name: 1.0}), ids(1, 601)
    measure = Distillation(model, original, {"logit-kl": 1.0})
    with torch.no_grad():
        before, far = objective(held).item(), measure(held).item()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(60):
        optimizer.zero_grad()
        objective(ids(4, 65)).backward()
        optimizer.step()
    with torch.no_grad():
        assert objective(held).item() < 0.7 * before
        assert measure(held).item() < 0.9 * far


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


def test_a_teacher_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the model's num_hidden_layers = 3, got 2; name what"):
        Distillation(student(teacher()), teacher(num_hidden_layers=2), {"logit-kl": 1.0})


def test_matching_attention_needs_layers_that_changed() -> None:
    with pytest.raises(ValueError, match=r"'attention-output' needs layers that were changed.*convert the model first"):
        Distillation(teacher(), teacher(), {"attention-output": 1.0})
