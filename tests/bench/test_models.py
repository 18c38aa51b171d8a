"""Decoding, reading and training take every step at toy size, and give no figures when a mode computes otherwise."""

import gc
import time
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from farspan import FarspanConfig, FarspanForCausalLM
from farspan.bench import Row, Steps, decode, model
from farspan.bench.checks import ResultsDifferError
from farspan.layers import Attention
from tests.ops.kernels import decoding

pytestmark = pytest.mark.usefixtures("one_thread")
ONCE: dict[str, Any] = {"repeats": 1, "device": "cpu"}


def take(steps: Steps) -> list[Row]:
    return [row for _, measure in steps for row in measure()]


def made(name: str) -> FarspanForCausalLM:
    return decode.build(decode.make_config("tiny", name, window=16), "cpu")


def decoder(name: str, mode: str = "eager", context: int = 40, batch: int = 1) -> decode.Decoder:
    return decode.Decoder(made(name), mode, context, batch, spare=60)


def test_every_step_at_toy_size() -> None:
    layouts = ["coca-exact", "hybrid-pope"]
    options: dict[str, Any] = {**ONCE, "window": 16, "layouts": layouts, "repeats": 2}
    rows = take(decode.steps("tiny", contexts=[40], batches=[2], prompts=[100], **options))
    found = [row for row in rows if row["kind"] == "decode"]
    assert [(row["mode"], row["attention"]) for row in found] == [("eager", name) for name in ("rope", *layouts)]
    for row in found:
        assert row["tokens_per_second"] == pytest.approx(2e3 / row["milliseconds_a_step"]["median"])
        assert row["error"] <= row["allowed"]
        assert row["peak_bytes"] >= row["cache_bytes"] + row["weight_bytes"]
    growing = {row["attention"]: row["cache_over_rope"] for row in found}
    assert growing["coca-exact"] == pytest.approx(0.75)
    wide = 3 * 15 * 1.5  # a window's keys are twice as wide
    assert growing["hybrid-pope"] == pytest.approx((40 + wide) / 160, abs=0.06)
    prompts = [row for row in rows if row["kind"] == "prefill"]
    assert [row["cache_over_rope"] for row in prompts] == [1.0, 0.75, (100 + wide) / 400]
    assert {row["attention"] for row in rows if row["kind"] == "best"} == {"rope", *layouts}


def test_each_is_quoted_in_its_best_mode() -> None:
    speeds = {("rope", "eager"): 2.0, ("rope", "graph"): 4.0, ("pope", "eager"): 5.0, ("pope", "graph"): 3.0}
    label = {"kind": "decode", "context": 8, "batch": 1, "sdpa_first": None, "cache_bytes": 1}
    rows = [label | {"attention": x, "mode": mode, "tokens_per_second": y} for (x, mode), y in speeds.items()]
    best = decode.best_modes([*rows, {"kind": "missing"}])
    found = {row["attention"]: (row["mode"], row["speed_over_rope"]) for row in best}
    assert found == {"rope": ("graph", 1.0), "pope": ("eager", 1.25)}


@pytest.mark.parametrize("name", ["rope", "coca-exact", "hybrid-coca-exact", "hybrid-pope"])
@torch.no_grad()
def test_both_caches_hold_the_same_context_and_can_be_rewound(name: str) -> None:
    """A static cache gives the growing one's logits, also after it went on and came back, and as float64 does."""
    tokens, logits = torch.randint(0, 512, (3, 2)), []
    for mode in ("eager", "graph"):
        one = decoder(name, mode, batch=2)
        logits.append(one.follow(tokens))
        one.several()
        one.rewind()
        logits.append(one.follow(tokens))
    assert all((x - logits[0]).abs().max() <= 1e-5 for x in logits)
    assert (logits[0][:, 0] - decode.exact(one, tokens)).abs().max() <= 1e-5


def test_every_cache_gives_the_same_logits_on_the_kernel() -> None:
    """In Triton's interpreter where there is no GPU."""
    pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")
    options = {"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 16, "vocab_size": 64}
    config = FarspanConfig.preset("tiny", **options)
    on_the_kernel = FarspanForCausalLM(config).eval().to("cuda" if torch.cuda.is_available() else "cpu")
    eager: dict[str, Any] = {}
    with decoding("triton"):
        for mode in ("eager", "graph"):  # a static cache; a graph of it is captured by `settle`
            one = decode.Decoder(on_the_kernel, mode, 40, 1, spare=20)
            assert decode.check_steps(one, "coca-exact", mode, eager)["error"] <= 1e-5
            assert one.cache.get_seq_length() == 40 + decode.CHECKED


def test_no_figures_when_a_step_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any mode beside float64, and in mode "graph" beside the eager steps."""
    models, eager = {"rope": made("rope")}, dict[str, Any]()
    decode.decode(models, "eager", 40, 2, eager=eager, **ONCE)
    follow, compute = decode.Decoder.follow, Attention.attend
    noise = lambda self, tokens: follow(self, tokens) + 0.01 * torch.randn(self.logits.shape)  # noqa: E731
    monkeypatch.setattr(decode.Decoder, "follow", noise)
    with pytest.raises(ResultsDifferError, match="rope, a decoding step in mode graph beside the eager one, is wrong"):
        decode.decode(models, "graph", 40, 2, eager=eager, **ONCE)
    monkeypatch.setattr(decode.Decoder, "follow", follow)
    off = lambda self, q, *x, **options: compute(self, q, *x, **options) * (q.element_size() // 8)  # noqa: E731
    monkeypatch.setattr(Attention, "attend", off)  # float64, which is the truth, stays right
    with pytest.raises(ResultsDifferError, match="rope, a decoding step, is wrong"):
        decode.decode(models, "eager", 40, 2, eager={}, **ONCE)


def test_the_fastest_order_of_kernels_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    one = decoder("rope")
    one.settle("cpu")
    assert one.order is None
    several, in_turn = one.several, decode.in_turn
    monkeypatch.setattr(one, "several", lambda: several() or time.sleep(0.2 * (one.order == "flash")))
    monkeypatch.setattr(decode, "in_turn", lambda calls, repeats, device: in_turn(calls, repeats=1, device="cpu"))
    one.settle("cuda")
    assert (one.order, one.cache.get_seq_length()) == ("cudnn", 40)
    one.step()


def test_a_decoder_takes_its_cache_along() -> None:
    """At once: the next mode's would not fit beside it."""
    one = decoder("rope")
    one.settle("cpu")
    one.several()
    cache = weakref.ref(one.cache)
    gc.disable()
    try:
        del one
        assert cache() is None
    finally:
        gc.enable()


def test_the_peak_is_that_of_the_step_that_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the order of kernels that was chosen, and, as at first, without spare slots in the growing cache."""
    measure, found = decode.peak_bytes, []

    def watch(call: Any, device: str) -> int:
        one = call.__self__
        found.append((one.order, one.cache.get_seq_length(), one.cache.layers[0]._buffers))
        return measure(call, device)

    monkeypatch.setattr(decode.Decoder, "settle", lambda self, device: setattr(self, "order", "cudnn"))
    monkeypatch.setattr(decode, "peak_bytes", watch)
    [row] = decode.decode({"rope": made("rope")}, "eager", 40, 1, eager={}, **ONCE)
    assert found == [("cudnn", 40, None)]
    assert row["sdpa_first"] == "cudnn"


@pytest.fixture
def wrong_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention that is left out in the dtype that is timed, and right in the one it is checked with."""
    right = F.scaled_dot_product_attention
    off = lambda q, *args, **options: right(q, *args, **options) * (q.dtype == torch.float64)  # noqa: E731
    monkeypatch.setattr(F, "scaled_dot_product_attention", off)


def test_no_figures_when_a_prompt_is_read_wrongly(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Prompts are timed as often as asked, in chunks, and what the last reading ended with is compared."""
    models = {name: made(name) for name in ("rope", "hybrid-rope")}
    monkeypatch.setattr(decode, "CHUNK", 16)
    rows = decode.prefill(models, 40, device="cpu", repeats=5)
    assert all(len(row["seconds"]) == 5 and row["error"] <= 1e-5 for row in rows)
    request.getfixturevalue("wrong_in_float32")
    with pytest.raises(ResultsDifferError, match="rope, a prompt of 40 tokens, is wrong"):
        decode.prefill(models, 40, device="cpu", repeats=1)


def test_decoding_is_timed_beside_transformers_llama() -> None:
    """With its own growing cache, whose reset keeps the length, and reading a prompt."""
    models = {"rope": made("rope"), "llama": decode.build(decode.llama_config("tiny"), "cpu")}
    rows = decode.decode(models, "eager", 40, 2, eager={}, **ONCE)
    assert [(row["attention"], row["cache_over_rope"]) for row in rows] == [("rope", 1.0), ("llama", 1.0)]
    assert all(row["error"] <= 1e-5 for row in [*rows, *decode.prefill(models, 24, device="cpu", repeats=1)])
    static = decode.Decoder(models["llama"], "graph", 40, 2, spare=20)
    assert static.cache.is_compileable
    assert decode.check_steps(static, "llama", "eager", {})["error"] <= 1e-5


@pytest.mark.parametrize(("broken", "missing"), [("pope", ["pope"]), ("rope", ["pope", "rope"])])
def test_one_model_that_cannot_run_leaves_the_others_their_figures(
    monkeypatch: pytest.MonkeyPatch, broken: str, missing: list[str]
) -> None:
    models, eager, settle = {name: made(name) for name in ("rope", "pope")}, dict[str, Any](), decode.Decoder.settle
    decode.decode(models, "eager", 40, 1, eager=eager, **ONCE)

    def fails(self: decode.Decoder, device: str) -> None:
        if self.model is models[broken]:
            raise RuntimeError("no memory\nsecond line")
        settle(self, device)

    monkeypatch.setattr(decode.Decoder, "settle", fails)
    rows = decode.decode(models, "graph", 40, 1, eager=eager, **ONCE)
    reasons = {row["attention"]: row["why"] for row in rows if row["kind"] == "missing"}
    assert (sorted(reasons), reasons[broken]) == (missing, "RuntimeError: no memory")


def test_more_models_are_compiled_than_torch_keeps_graphs_of_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    compile, model = torch.compile, made("rope")
    monkeypatch.setattr(torch, "compile", lambda *args, **options: compile(*args, backend="eager", **options))
    with torch._dynamo.config.patch(recompile_limit=2):
        for batch in range(1, 4):
            decode.Decoder(model, "compiled", 8, batch, spare=20).settle("cpu")


# Training


@pytest.mark.parametrize("body", [False, True])
@pytest.mark.parametrize(("break_it", "what"), [("loss", "the loss of a step"), ("attention", "the gradient of model")])
def test_no_figures_when_a_training_step_is_wrong(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, break_it: str, what: str, body: bool
) -> None:
    config = FarspanConfig.preset("tiny", attention="coca-exact", num_hidden_layers=1)
    one = FarspanForCausalLM(config).train()
    step = model.Step(one, torch.randint(0, config.vocab_size, (6, 17)), "cpu", body=body)
    step()
    before = one.lm_head.weight.detach().clone()
    assert model.check_step("coca-exact", step, torch.float32)["gradient_error"] <= 1e-4
    assert torch.equal(one.lm_head.weight, before)  # the first timed step starts from what was checked
    assert all(p.grad is None for p in one.parameters())
    if break_it == "loss":
        right = model.Step.backward
        monkeypatch.setattr(model.Step, "backward", lambda self: 1.001 * right(self))
    else:
        request.getfixturevalue("wrong_in_float32")
        monkeypatch.setitem(model.LOSS, torch.float32, 1.0)  # random tokens: it may not show
    with pytest.raises(ResultsDifferError, match=f"coca-exact, {what}"):
        model.check_step("coca-exact", step, torch.float32)


def test_complete_models_and_bodies_are_timed_beside_full_rope() -> None:
    options: dict[str, Any] = {"window": 16, "compile": False, **ONCE}
    variants = {"training": ["rope", "coca-exact", "cosformer"], "body": ["rope", "hybrid-pope"]}
    rows = take(model.training("tiny", variants=variants["training"], rows=2, length=16, **options))
    rows += take(model.bodies("tiny", variants["body"], [40], **options))
    assert [(row["kind"], row["attention"]) for row in rows] == [(kind, x) for kind in variants for x in variants[kind]]
    assert rows[1]["parameters"] < rows[0]["parameters"]
    assert (rows[0]["time_over_rope"], rows[3]["time_over_rope"]) == (1.0, 1.0)
    for row in rows:
        assert row["error"] <= row["allowed"]
        assert row["gradient_error"] <= row["gradient_allowed"]
        assert (len(row["seconds"]), row["window"]) == (1, 16)
        assert 0 < row["mfu"] < 1
