"""A calibrated layer is near the layer it replaces, and the report says how near."""

import pytest
import torch

from farspan import FarspanConfig, FarspanForCausalLM
from farspan.bench.timing import peak_bytes
from farspan.checkpoints import CalibrationConfig, Target, calibrate, replace_attention
from farspan.checkpoints.calibrate import (
    Inputs,
    Streams,
    attention_rows,
    closed_form,
    descend,
    errors,
    start_closed_form,
)
from farspan.layers import Attention, AttentionSpec


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


@pytest.mark.parametrize("kind", ["rope", "coca-exact", "coca-slack", "coca-strict", "coca-polar", "pope"])
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"rotary": False}], ids=str)
def test_rows_are_what_the_layer_computes(kind: str, options: dict) -> None:
    spec = AttentionSpec(**{**AttentionSpec.parse(kind).to_dict(), **options})
    one, x = layer(spec, qk_norm_eps=1e-6), torch.randn(2, 11, 32, dtype=torch.float64)  # type: ignore[arg-type]
    log_weights, output = attention_rows(one, x)
    assert (output - one(x)).abs().max() <= 1e-12
    assert torch.allclose(log_weights.exp().sum(-1), torch.ones(2, 4, 11, dtype=torch.float64))


@pytest.mark.parametrize("form", ["exact", "slack"])
def test_the_closed_form_is_the_least_squares_fit_over_evenly_spread_angles(form: str) -> None:
    """One pair, written out with its angles: no other t is nearer to the teacher's scores."""
    q, k = torch.randn(1, 1, 40, 2, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    best = float(closed_form([(q, q)], form, 1)[0, :, 0] @ k)
    m, n = torch.meshgrid(*[torch.arange(16, dtype=torch.float64) * 2 * torch.pi / 16] * 2, indexing="ij")
    query = torch.complex(*q[0, 0].T)[:, None, None]
    rotated = query * torch.polar(torch.ones_like(m), m)  # f(q, m), for each query
    teacher = (rotated * (torch.complex(*k) * torch.polar(torch.ones_like(n), n)).conj()).real
    if form == "exact":
        unit = (rotated * (query * torch.polar(torch.ones_like(n), n)).conj()).real
    else:
        ones = torch.polar(torch.ones_like(n), n) * complex(1, 1)  # f((1, 1), n)
        unit = rotated.real * query.real * ones.real + rotated.imag * query.imag * ones.imag
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
    start_closed_form(student, original, [(x, x)])
    assert max(errors(student, original, x, x)) <= (0.2 if qk_norm else 1e-6)  # RMS over t is not RMS over k


@pytest.mark.parametrize("spec", ["coca-exact", "coca-slack", "coca-strict"])
def test_each_stage_comes_nearer_to_the_teacher(spec: str) -> None:
    model, ids = teacher_model(), torch.randint(0, 12, (10, 12))  # few words: what is learnt holds for new windows
    report = calibrate(model, spec, ids, CalibrationConfig(steps=20, lr=2e-2, held_out=0.2))
    assert [layer["layer"] for layer in report.layers] == [0, 1]
    for one in report.layers:
        assert one["attention"] == spec
        assert one["fitted"]["attention_kl"] < one["closed"]["attention_kl"]
        assert one["fitted"]["attention_kl"] < 0.7 * one["copied"]["attention_kl"]
    assert report.tokens == 10 * 12
    assert {s.name for s in model.config.attention_specs} == {spec}


def test_the_report_is_true_of_the_model_that_is_returned() -> None:
    model, ids = teacher_model(), torch.randint(0, 512, (8, 24))
    first = model.model.layers[0].self_attn
    report = calibrate(model, "coca-exact", ids, CalibrationConfig(steps=5, batch=1, held_out=0.25))
    x = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids[-2:]))
    last = model.model.layers[0].self_attn
    with torch.no_grad():
        expected = sum(float(errors(last, first, w, w)[0]) for w in x.split(1)) / 2
    assert report.layers[0]["fitted"]["attention_kl"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("windows", "options"), [(2, {}), (8, {"batch": 8}), (3, {"batch": 1, "held_out": 0.99}), (6, {"lr": 1e20})]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_number_of_windows_is_split_and_a_descent_that_diverges_is_not_kept(
    dtype: torch.dtype, windows: int, options: dict
) -> None:
    model, ids = teacher_model().to(dtype), torch.randint(0, 12, (windows, 16))
    report = calibrate(model, "coca-exact", ids, CalibrationConfig(**{"steps": 3, **options}))
    assert [one["layer"] for one in report.layers] == [0, 1]
    if "lr" in options:
        assert all(one["fitted"] == one["closed"] for one in report.layers)
    assert all(p.isfinite().all() and p.dtype == dtype for p in model.parameters())


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(3, dtype=torch.long), "ids must be whole numbers of shape"),
        (
            torch.zeros(4, 65, dtype=torch.long),
            "at most 64 tokens per sequence, the training length or a new window, got 65",
        ),
        (torch.full((4, 8), 512), "ids must lie below vocab_size = 512, got 512"),
    ],
)
def test_bad_calibration_raises(ids: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calibrate(teacher_model(), "coca-exact", ids)


@pytest.mark.parametrize("attention", ["hybrid-rope", "hybrid-coca-exact", "hybrid-coca-polar", "hybrid-pope"])
def test_hybrids_are_fitted_as_far_as_they_see(attention: str) -> None:
    model, ids = teacher_model(), torch.randint(0, 12, (8, 24))
    before = {name: p.clone() for name, p in model.named_parameters()}
    report = calibrate(model, Target(attention, 24, 2), ids, CalibrationConfig(steps=20, lr=1e-2))
    kind = attention.removeprefix("hybrid-")
    found = [(s.name, s.window, s.rotary) for s in model.config.attention_specs]
    assert found == [(kind, 24, True), ("rope", None, False)]
    assert [one["layer"] for one in report.layers] == ([1] if kind == "rope" else [0, 1])
    assert all(sum(one["fitted"].values()) < sum(one["copied"].values()) for one in report.layers)
    kept = [name for name, p in model.named_parameters() if name in before and torch.equal(p, before[name])]
    moved = {name for name in before if name.startswith("model.layers.1.self_attn.")} - set(kept)
    assert {name.split(".")[4] for name in moved} == {"q_proj", "k_proj"}
    if kind == "rope":  # a window layer keeps its weights
        assert {name for name in before if name.startswith("model.layers.0.")} <= set(kept)
    with pytest.raises(ValueError, match=r"at most 23 tokens per sequence, .* got 24"):
        calibrate(teacher_model(), Target(attention, 23, 2), ids)


def test_what_needs_no_fit() -> None:
    """A model that stays RoPE; and a window of the source hides nothing new."""
    model, ids = teacher_model(), torch.randint(0, 512, (6, 24))
    with pytest.raises(ValueError, match=r"needs layers of another kind to fit, got \['rope'\]; give attention"):
        calibrate(model, "rope", ids)
    for layer in range(2):
        replace_attention(model, layer, AttentionSpec("rope", window=7))
    calibrate(model, "coca-exact", ids, CalibrationConfig(steps=2))
    assert [(s.name, s.window) for s in model.config.attention_specs] == [("coca-exact", 7)] * 2


def test_a_descent_changes_queries_and_keys_of_the_student_alone() -> None:
    model, x = teacher_model(), torch.randn(2, 8, 32)
    teacher = model.model.layers[0].self_attn
    theirs = {name: p.detach().clone() for name, p in teacher.named_parameters()}
    student = replace_attention(model, 0, AttentionSpec("coca", "polar"))
    before = {name: p.detach().clone() for name, p in student.named_parameters()}
    descend(student, teacher, [(x, x)], steps=2, lr=1e-2)
    for name, p in student.named_parameters():
        assert torch.equal(p, before[name]) == name.startswith(("v_proj", "o_proj"))
    assert all(torch.equal(p, theirs[name]) for name, p in teacher.named_parameters())


def test_numbers_beyond_the_dtype_raise() -> None:
    """Weights may be finite and what they compute not."""
    model, ids = teacher_model().half(), torch.randint(0, 12, (4, 16))
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.fill_(6e4)
        model.model.layers[0].mlp.up_proj.weight.fill_(6e4)
    with pytest.raises(ValueError, match=r"layer 1 computes numbers that are not finite in torch.float16; convert in"):
        calibrate(model, "coca-exact", ids, CalibrationConfig(steps=1))


# Hidden states of all sequences


def test_memory_holds_two_streams_and_a_batch(one_thread: None) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    teacher = FarspanForCausalLM(FarspanConfig.preset("tiny", attention="rope", **shape)).eval()
    ids, settings = torch.randint(0, 512, (512, 64)), CalibrationConfig(steps=1, batch=4)
    layer = sum(p.nbytes for p in teacher.model.layers[0].parameters())
    stream, batch = ids.numel() * 128 * 4, 4 * 64 * 128 * 4
    allowed = 2 * stream + 2 * layer + 32 * batch  # of a batch: queries, keys, scores, products, for both models
    assert allowed < 3 * stream
    assert peak_bytes(lambda: calibrate(teacher, "coca-exact", ids, settings), "cpu") <= allowed


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_streams_are_the_models_hidden_states_on_both_sides(device: str) -> None:
    model = FarspanForCausalLM(FarspanConfig.preset("tiny", attention="rope")).eval().to(device)
    ids, layers = torch.randint(0, 512, (5, 12), device=device), model.model.layers
    with torch.no_grad():
        before = model(ids, output_hidden_states=True).hidden_states
        streams = Streams(model, ids, batch=2)
        streams.advance(layers[0], layers[0].self_attn, layers[0].self_attn)
        assert torch.allclose(streams.teacher, before[1].cpu(), atol=1e-6)
        original = layers[1].self_attn
        streams.advance(layers[1], original, replace_attention(model, 1, AttentionSpec("coca", "exact")))
        after = model(ids, output_hidden_states=True).hidden_states
    inputs = Inputs(streams, layers[2], slice(1, 4))
    assert len(inputs) == 2
    norm = layers[2].input_layernorm
    for i, stream in enumerate((before[2], after[2])):
        assert torch.allclose(torch.cat([pair[i] for pair in inputs]), norm(stream[1:4]), atol=1e-5)
    assert not torch.allclose(before[2], after[2], atol=1e-3)
