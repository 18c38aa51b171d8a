"""A calibrated layer is near the layer it replaces, and the report says how near."""

from pathlib import Path

import pytest
import torch

from farspan import FarspanConfig, FarspanForCausalLM
from farspan.convert import CalibrationConfig, calibrate, from_pretrained
from farspan.convert.fit import QueryMoments, attention_rows, descend, divergence, output_error, start
from farspan.convert.pretrained import give_attention
from farspan.convert.target import Target, local_and_global, replace_attention
from farspan.layers import Attention, AttentionSpec
from tests.convert.sources import saved


def teacher_model(**options: object) -> FarspanForCausalLM:
    """A small RoPE model whose queries and keys have directions, as trained ones have, and not only noise."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_key_value_heads": 2}
    config = FarspanConfig.preset("tiny", **shape, attention="rope", qkv_bias=True, **options)
    model = FarspanForCausalLM(config).eval()
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.q_proj.bias.normal_()
            block.self_attn.k_proj.weight.mul_(8)
            block.self_attn.q_proj.weight.mul_(4)
            block.self_attn.v_proj.weight.mul_(8)
    return model


def layer(kind: str, **options: object) -> Attention:
    return Attention(32, 4, AttentionSpec.parse(kind), num_key_heads=2, **options).double()  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["rope", "coca-exact", "coca-slack", "coca-strict"])
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"rotary": False}], ids=str)
def test_rows_are_what_the_layer_computes(kind: str, options: dict) -> None:
    spec = AttentionSpec(**{**AttentionSpec.parse(kind).to_dict(), **options})
    one, x = layer(spec, qk_norm_eps=1e-6), torch.randn(2, 11, 32, dtype=torch.float64)  # type: ignore[arg-type]
    rows = attention_rows(one, x)
    assert (rows.output - one(x)).abs().max() <= 1e-12
    assert torch.allclose(rows.log_weights.exp().sum(-1), torch.ones(2, 4, 11, dtype=torch.float64))


@pytest.mark.parametrize("form", ["exact", "slack"])
def test_the_closed_form_is_the_least_squares_fit_over_evenly_spread_angles(form: str) -> None:
    """One pair, written out with its angles: no other t is nearer to the teacher's scores."""
    q, k = torch.randn(1, 1, 40, 2, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    moments = QueryMoments(Attention(2, 1, AttentionSpec("coca", form), head_dim=2).double())
    moments.add(q, q)
    best = float(moments.coefficients()[0, :, 0] @ k)
    m, n = torch.meshgrid(*[torch.arange(16, dtype=torch.float64) * 2 * torch.pi / 16] * 2, indexing="ij")
    query = torch.complex(*q[0, 0].T)[:, None, None]
    turned = query * torch.polar(torch.ones_like(m), m)  # f(q, m), for each query
    teacher = (turned * (torch.complex(*k) * torch.polar(torch.ones_like(n), n)).conj()).real
    if form == "exact":
        unit = (turned * (query * torch.polar(torch.ones_like(n), n)).conj()).real
    else:
        ones = torch.polar(torch.ones_like(n), n) * complex(1, 1)  # f((1, 1), n)
        unit = turned.real * query.real * ones.real + turned.imag * query.imag * ones.imag
    assert best == pytest.approx(float((teacher * unit).sum() / unit.pow(2).sum()), rel=1e-9)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_closed_form_finds_a_teacher_that_is_coca(qk_norm: bool) -> None:
    """If every query of a pair is the same vector c and keys are t·c, RoPE *is* exact CoCA; W_T must be found."""
    model = teacher_model(qk_norm=qk_norm)
    original = model.model.layers[0].self_attn
    with torch.no_grad():
        original.q_proj.weight.zero_()
        direction = torch.rand(2, 4) + 0.5  # members, pairs
        original.q_proj.bias.copy_(direction.flatten().repeat(4))
        t = torch.rand(2, 4, 32) * 0.05
        original.k_proj.weight.copy_((t[:, None] * direction[None, :, :, None]).flatten(0, 2))
        original.k_proj.bias.zero_()
    student = replace_attention(model, 0, AttentionSpec("coca", "exact"))
    x = torch.rand(2, 20, 32)  # positive, so that t ≥ 0 without the ReLU
    start(student, original, [(x, x)])
    goal, rows = attention_rows(original, x), attention_rows(student, x)
    limit = 0.2 if qk_norm else 1e-6  # RMS over t is not RMS over k
    assert divergence(goal, rows) <= limit
    assert output_error(goal, rows) <= limit


@pytest.mark.parametrize("spec", ["coca-exact", "coca-slack", "coca-strict"])
def test_each_stage_comes_nearer_to_the_teacher(spec: str) -> None:
    model, ids = teacher_model(), torch.randint(0, 12, (10, 12))  # few words: what is learnt holds for new windows
    report = calibrate(model, spec, ids, CalibrationConfig(steps=20, lr=2e-2, held_out=0.2))
    assert [layer.layer for layer in report.layers] == [0, 1]
    for one in report.layers:
        assert one.attention == spec
        assert one.fitted.attention_kl < one.closed.attention_kl
        assert one.fitted.attention_kl < 0.7 * one.copied.attention_kl
    assert report.tokens == 10 * 12
    assert {s.name for s in model.config.attention_specs} == {spec}
    assert len(report.rows()) == 2


def test_the_report_is_true_of_the_model_that_is_returned() -> None:
    model, ids = teacher_model(), torch.randint(0, 512, (8, 24))
    first = model.model.layers[0].self_attn
    report = calibrate(model, "coca-exact", ids, CalibrationConfig(steps=5, batch=1, held_out=0.25))
    x = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids[-2:]))
    with torch.no_grad():
        pairs = [(attention_rows(first, w), attention_rows(model.model.layers[0].self_attn, w)) for w in x.split(1)]
        expected = sum(float(divergence(a, b)) for a, b in pairs) / 2
        out, goal = (torch.cat([pair[i].output for pair in pairs]) for i in (1, 0))
        stream = model.model.embed_tokens(ids[-2:]) + goal
        felt = float(((out - goal).norm(dim=-1) / stream.norm(dim=-1)).pow(2).mean())
    assert report.layers[0].fitted.attention_kl == pytest.approx(expected, rel=1e-4)
    assert report.layers[0].stream_error == pytest.approx(felt, rel=1e-4)


def test_the_teacher_is_left_as_it_was() -> None:
    """A student that shared its teacher's memory would chase its own tail, and `keep_rope` restore a changed layer."""
    model, ids = teacher_model(), torch.randint(0, 12, (6, 16))
    with torch.no_grad():
        before = model(ids).logits
        calibrate(model, "coca-exact", ids, CalibrationConfig(steps=3, fit="tqvo"), keep_rope=2)
        assert torch.equal(model(ids).logits, before)


def test_the_worst_layers_can_stay_rope() -> None:
    ids = torch.randint(0, 512, (6, 24))
    report = calibrate(model := teacher_model(), "coca-exact", ids, CalibrationConfig(steps=3), keep_rope=1)
    worst = max(report.layers, key=lambda one: one.stream_error).layer
    assert report.kept == (worst,)
    assert [s.kind for s in model.config.attention_specs] == ["rope" if i == worst else "coca" for i in range(2)]
    assert [b.self_attn.spec.kind for b in model.model.layers] == [s.kind for s in model.config.attention_specs]
    torch.manual_seed(0)
    teacher = teacher_model()
    assert model(ids).logits.shape == teacher(ids).logits.shape
    all_rope = calibrate(again := teacher_model(), "coca-exact", ids, CalibrationConfig(steps=1), keep_rope=2)
    assert all_rope.kept == (0, 1)
    assert {s.kind for s in again.config.attention_specs} == {"rope"}


def test_layers_left_rope_are_untouched_and_need_no_fit() -> None:
    model, ids = teacher_model(), torch.randint(0, 512, (6, 24))
    before = model.model.layers[0].self_attn
    report = calibrate(model, ["rope", "coca-slack"], ids, CalibrationConfig(steps=2))
    assert model.model.layers[0].self_attn is before
    assert [one.layer for one in report.layers] == [1]


def test_local_and_global_layers_are_fitted_as_far_as_they_see() -> None:
    model, ids = teacher_model(), torch.randint(0, 512, (6, 24))
    layout = local_and_global("coca-exact", 2, 24, 2)
    report = calibrate(model, layout, ids, CalibrationConfig(steps=20))
    assert [(s.window, s.rotary) for s in model.config.attention_specs] == [(24, True), (None, False)]
    assert all(one.fitted.total < one.copied.total for one in report.layers)
    with pytest.raises(ValueError, match="windows of at most 23 tokens, what a new layer sees, got 24"):
        calibrate(teacher_model(), local_and_global("coca-exact", 2, 23), ids)


def test_a_window_that_the_source_has_too_hides_nothing() -> None:
    model = teacher_model()
    give_attention(model, Target("rope", window=7))
    calibrate(model, "coca-exact", torch.randint(0, 512, (6, 24)), CalibrationConfig(steps=2))
    assert [(s.name, s.window) for s in model.config.attention_specs] == [("coca-exact", 7)] * 2


def test_rope_with_another_window_needs_no_fit() -> None:
    """It is the model that copied weights make; and up to the window, the source itself."""
    ids = torch.randint(0, 512, (6, 24))
    give_attention(model := teacher_model(), Target("rope", window=24))
    with pytest.raises(ValueError, match=r"calibration needs CoCA layers to fit, got \['rope'\]; leave it out"):
        calibrate(teacher_model(), local_and_global("rope", 2, 24), ids)
    source = teacher_model()
    source.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, source(ids).logits)
        longer = torch.randint(0, 512, (1, 40))
        assert not torch.allclose(model(longer).logits, source(longer).logits)


def test_a_bfloat16_model_stays_one() -> None:
    model, ids = teacher_model().to(torch.bfloat16), torch.randint(0, 512, (4, 16))
    calibrate(model, "coca-exact", ids, CalibrationConfig(steps=2))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(ids).logits.isfinite().all()


@pytest.mark.parametrize(("windows", "options"), [(2, {}), (8, {"batch": 8}), (3, {"batch": 1, "held_out": 0.99})])
def test_some_windows_are_held_out_and_some_fitted_whatever_their_number(windows: int, options: dict) -> None:
    model, ids = teacher_model(), torch.randint(0, 12, (windows, 16))
    report = calibrate(model, "coca-exact", ids, CalibrationConfig(steps=2, **options))
    assert [one.layer for one in report.layers] == [0, 1]
    assert {s.name for s in model.config.attention_specs} == {"coca-exact"}


def test_a_descent_that_diverges_is_not_kept() -> None:
    model, ids = teacher_model(), torch.randint(0, 12, (6, 16))
    report = calibrate(model, "coca-exact", ids, CalibrationConfig(steps=3, lr=1e20))
    assert all(one.fitted == one.closed for one in report.layers)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_numbers_beyond_the_dtype_are_refused() -> None:
    """Weights may be finite and what they compute not."""
    model, ids = teacher_model().half(), torch.randint(0, 12, (4, 16))
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.fill_(6e4)
        model.model.layers[0].mlp.up_proj.weight.fill_(6e4)
    with pytest.raises(
        ValueError, match=r"layer 1 must compute finite numbers .* in torch.float16; convert in a dtype"
    ):
        calibrate(model, "coca-exact", ids, CalibrationConfig(steps=1))


def test_a_descent_leaves_what_takes_gradients_as_it_was() -> None:
    model, x = teacher_model(), torch.randn(2, 8, 32)
    teacher = model.model.layers[0].self_attn
    student = replace_attention(model, 0, AttentionSpec("coca", "exact"))
    student.v_proj.requires_grad_(False)
    before = {name: (p.detach().clone(), p.requires_grad) for name, p in student.named_parameters()}
    descend(student, teacher, [(x, x)], fit="t", steps=2, lr=1e-2)
    for name, p in student.named_parameters():
        assert torch.equal(p, before[name][0]) == (not name.startswith("t_proj"))
        assert p.requires_grad == before[name][1]
        assert p.grad is None


def test_from_pretrained_calibrates(tmp_path: Path) -> None:
    saved(tmp_path, "qwen3")
    ids = torch.randint(0, 64, (6, 16))
    copied = from_pretrained(tmp_path, "coca-exact")
    fitted = from_pretrained(tmp_path, "coca-exact", calibration=ids, calibration_config=CalibrationConfig(steps=3))
    with torch.no_grad():
        assert not torch.equal(copied(ids).logits, fitted(ids).logits)


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (torch.zeros(3, dtype=torch.long), {}, "ids must be whole numbers of shape"),
        (torch.zeros(4, 65, dtype=torch.long), {}, "windows of at most the training length 64, got 65"),
        (torch.full((4, 8), 512), {}, "ids must lie below vocab_size = 512, got 512"),
        (torch.zeros(4, 8, dtype=torch.long), {"keep_rope": 3}, "keep_rope must be 0 … 2 layers, got 3"),
    ],
)
def test_bad_calibration_is_refused(ids: torch.Tensor, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calibrate(teacher_model(), "coca-exact", ids, **options)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="fit must be made of the letters tqvo, got 'x'"):
        CalibrationConfig(fit="x")
    with pytest.raises(ValueError, match="inputs must be 'student' or 'teacher'"):
        CalibrationConfig(inputs="pupil")
    for share in (0.0, 1.0, -1.0):
        with pytest.raises(ValueError, match=f"held_out must be a share of the windows between 0 and 1, got {share}"):
            CalibrationConfig(held_out=share)
