"""Decoding, reading and training take every step at toy size, and give no figures when a mode computes otherwise."""

import gc
import time
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from farspan import FarspanCache, FarspanConfig, FarspanForCausalLM
from farspan.bench import Row, Steps, decode, model
from farspan.bench.checks import ResultsDifferError
from farspan.layers import Attention
from farspan.ops.coca import COCA, decode_triton

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL: dict[str, Any] = {"contexts": [40], "batches": [2], "prompts": [], "repeats": 2}
LAYOUT = {"window": 16, "global_every": 2}


def take(steps: Steps) -> list[Row]:
    return [row for _, measure in steps for row in measure()]


def made(name: str, **fields: Any) -> FarspanForCausalLM:
    options = LAYOUT if name.startswith("hybrid") else {}
    return decode.build(decode.make_config("tiny", name, **options, **fields), "cpu", 0)


def decoder(name: str, mode: str = "eager", context: int = 40, batch: int = 1, seed: int = 0) -> decode.Decoder:
    return decode.Decoder(made(name), mode, context, batch, spare=60, seed=seed)


def test_every_step_at_toy_size(monkeypatch: pytest.MonkeyPatch) -> None:
    make = FarspanConfig.preset  # two layers, since torch.compile takes a second for each
    monkeypatch.setattr(FarspanConfig, "preset", lambda name, **options: make(name, num_hidden_layers=2, **options))
    layouts = ["coca-exact", "hybrid-pope"]
    rows = take(decode.steps("tiny", **(SMALL | {"prompts": [100]}), layouts=layouts, **LAYOUT))
    names = ["rope", *layouts]
    found = [row for row in rows if row["kind"] == "decode"]
    assert [(row["mode"], row["attention"]) for row in found] == [(m, x) for m in ("eager", "compiled") for x in names]
    for row in found:
        assert row["reads"] == ("tokens" if row["mode"] == "eager" else "all 128 slots, masked")
        assert row["tokens_per_second"] == pytest.approx(2e3 / row["milliseconds_a_step"]["median"])
        assert row["greedy_equal"] == 1.0
        rate = row["bytes_a_step"] / row["milliseconds_a_step"]["median"] / 1e9
        assert row["terabytes_a_second"] == pytest.approx(rate)
        assert row["of_copy"] == pytest.approx(rate / max(row["copy_terabytes_a_second"].values()))
        assert row["peak_bytes"] >= row["cache_bytes"] + row["weight_bytes"]
    growing = {row["attention"]: row["cache_over_rope"] for row in found[:3]}
    assert growing["coca-exact"] == pytest.approx(0.75)
    assert growing["hybrid-pope"] == pytest.approx((40 + 15) / 80, abs=0.06)  # spare tokens come on top
    [fastest] = [row["each"] for row in rows if row["kind"] == "best"]
    for name, chosen in fastest.items():
        speeds = [row["tokens_per_second"] for row in found if row["attention"] == name]
        assert chosen["tokens_per_second"] == max(speeds)
    assert fastest["rope"]["speed_over_rope"] == 1.0
    prompts = [row for row in rows if row["kind"] == "prefill"]
    assert [row["cache_over_rope"] for row in prompts] == [1.0, 0.75, (100 + 15) / 200]
    printed = decode.tables(rows)
    assert "missing: graph: CUDA graphs need a CUDA device" in printed
    assert "missing: half-width kernel: kernels need a CUDA device" in printed
    assert any("each in its best mode, over RoPE, 2 × 40: rope (" in str(part) for part in printed)


def test_grouped_heads_of_another_width_are_timed_end_to_end() -> None:
    rows = take(decode.steps("tiny", **(SMALL | {"prompts": [50]}), compile="none", group=2, head_dim=16))
    rows = [row for row in rows if row["kind"] != "missing"]
    assert {row["kind"] for row in rows} == {"decode", "best", "prefill"}
    assert all((row["heads"], row["key_heads"], row["head_dim"]) == (8, 4, 16) for row in rows if row["kind"] != "best")
    [rope] = [row for row in rows if row["kind"] == "decode" and row["attention"] == "rope"]
    assert rope["cache_bytes"] // (2 * 4 * 4 * 16 * 4 * 2) >= 40  # sequences, layers, key heads, width, bytes, k and v


@pytest.mark.parametrize(("compile", "expected"), [("none", 0), ("one", 1), ("all", 4)])
def test_what_is_compiled(compile: str, expected: int) -> None:
    steps = decode.steps("tiny", contexts=[20, 50], batches=[2, 1], prompts=[], compile=compile)
    labels = [label for label, _ in steps if label.startswith("compiled")]
    assert len(labels) == expected
    assert expected != 1 or labels == ["compiled, 2 × 50 tokens"]


@pytest.mark.parametrize("name", ["rope", "coca-exact", "hybrid-coca-exact", "hybrid-pope"])
@torch.no_grad()
def test_both_caches_hold_the_same_context_and_can_be_rewound(name: str) -> None:
    """A static cache gives the growing one's logits, also after it went on and came back, and as float64 does."""
    tokens, logits = torch.randint(0, 512, (3, 2)), []
    for mode in ("eager", "graph"):
        one = decoder(name, mode, batch=2, seed=1)
        logits.append(one.follow(tokens))
        one.several()
        one.rewind()
        logits.append(one.follow(tokens))
    assert all((x - logits[0]).abs().max() <= 1e-5 for x in logits)
    assert (logits[0][:, 0] - decode.exact(one, tokens)).abs().max() <= 1e-5
    other = FarspanCache(one.model.config)
    decode.fill(other, one.model, 2, 40, 2)
    assert not torch.equal(other.layers[-1].values, one.cache.layers[-1].values[:, :, :40])


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("name", ["rope", "coca-exact", "hybrid-rope"])
def test_a_step_reads_its_weights_and_its_cache(name: str, mode: str) -> None:
    """In a growing cache the context, in a static one on SDPA every slot; of a tied embedding the head."""
    one = decoder(name, mode, context=128, batch=2)
    table = 0 if one.model.config.tie_word_embeddings else one.model.get_input_embeddings().weight.nbytes
    assert one.bytes_a_step == sum(p.nbytes for p in one.model.parameters()) - table + one.cache.nbytes


@pytest.fixture
def on_the_kernel() -> FarspanForCausalLM:
    """A model that decodes on the kernel, in Triton's interpreter where there is no GPU."""
    pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")
    options = {"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 16, "vocab_size": 64}
    config = FarspanConfig.preset("tiny", decode_backend="triton", **options)
    return FarspanForCausalLM(config).eval().to("cuda" if torch.cuda.is_available() else "cpu")


def test_every_cache_gives_the_same_logits_on_the_kernel_and_no_figures_when_it_is_wrong(
    on_the_kernel: FarspanForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager: dict[str, Any] = {}
    for mode in ("eager", "graph"):  # a static cache; a graph of it is captured by `settle`
        one = decode.Decoder(on_the_kernel, mode, 40, 1, spare=20, seed=0)
        assert (one.decodes_on, one.reads) == ("half-width kernel", "tokens")
        found = decode.check_steps(one, "coca-exact", mode, eager)
        assert one.cache.get_seq_length() == 40 + decode.CHECKED
        assert max(found["logit_error"], found["logit_difference"]) <= 1e-5
    wrong = [
        entry._replace(run=lambda call: 1.05 * decode_triton(call)) if entry.name == "decode_triton" else entry
        for entry in COCA.entries
    ]
    monkeypatch.setattr(COCA, "entries", wrong)
    one = decode.Decoder(on_the_kernel, "eager", 40, 1, spare=20, seed=0)
    with pytest.raises(ResultsDifferError, match="coca-exact, a decoding step on the half-width kernel, is wrong"):
        decode.check_steps(one, "coca-exact", "eager", {})


def test_no_figures_of_steps_that_are_wrong_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = Attention.attend  # float64, which is the truth, stays right
    off = lambda self, q, *x, **options: compute(self, q, *x, **options) * (q.element_size() // 8)  # noqa: E731
    monkeypatch.setattr(Attention, "attend", off)
    with pytest.raises(ResultsDifferError, match="rope, a decoding step"):
        decode.check_steps(decoder("rope"), "rope", "eager", {})


def test_the_fastest_order_of_kernels_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    one = decoder("rope")
    assert decode.orders_for(one, "cpu") == [None]
    assert decode.orders_for(one, "cuda") == ["flash", "cudnn"]
    several = one.several
    monkeypatch.setattr(one, "several", lambda: several() or time.sleep(0.2 * (one.order == "flash")))
    assert one.settle("cpu", ["flash", "cudnn"], graph=False) == "cudnn"
    assert one.decodes_on == "SDPA, cudnn first"
    assert one.cache.get_seq_length() == 40
    one.step()


def test_a_decoder_takes_its_cache_along() -> None:
    """At once: the next mode's would not fit beside it."""
    one = decoder("rope")
    one.settle("cpu", [None], graph=False)
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
    monkeypatch.setattr(decode, "orders_for", lambda decoder, device: ["flash", "cudnn"])
    settle, measure, found = decode.Decoder.settle, decode.peak_bytes, []

    def settle_on_cudnn(self: decode.Decoder, *args: Any, **options: Any) -> str:
        settle(self, *args, **options)
        self.order = "cudnn"
        return self.order

    def watch(call: Any, device: str) -> int:
        one = call.__self__
        found.append((one.order, one.cache.get_seq_length(), one.cache.layers[0]._storage[0].buffer))
        return measure(call, device)

    monkeypatch.setattr(decode.Decoder, "settle", settle_on_cudnn)
    monkeypatch.setattr(decode, "peak_bytes", watch)
    options: dict[str, Any] = {"repeats": 1, "device": "cpu", "seed": 0, "eager": {}, "orders": {}}
    [row] = decode.decode({"rope": made("rope")}, "eager", 40, 1, **options)
    assert found == [("cudnn", 40, None)]
    assert row["decodes_on"] == "SDPA, cudnn first"


def test_greedy_tokens_go_on_from_each_other() -> None:
    one = decoder("coca-exact")
    one.step()
    chosen = one.token.clone()
    one.several()
    assert chosen.item() == decoder("coca-exact").follow(torch.tensor([[0]])).argmax()
    assert one.cache.get_seq_length() == 40 + 1 + decode.AT_ONCE


def test_no_figures_when_a_mode_differs_and_a_reason_when_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    follow = decode.Decoder.follow

    def off(self: decode.Decoder, tokens: torch.Tensor) -> torch.Tensor:
        static = self.cache.layers[0].is_compileable
        return follow(self, tokens) + static * 0.01 * torch.randn(self.logits.shape)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler\nsecond line")

    monkeypatch.setattr(decode.Decoder, "follow", off)
    models, eager = {"rope": made("rope")}, dict[str, Any]()
    options: dict[str, Any] = {"repeats": 1, "device": "cpu", "seed": 0, "eager": eager, "orders": {}}
    decode.decode(models, "eager", 40, 2, **options)
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    with pytest.raises(ResultsDifferError, match="rope, compiled: logits differ from the eager ones by"):
        decode.decode(models, "compiled", 40, 2, **options)
    monkeypatch.setattr(torch, "compile", broken)
    [row] = decode.decode(models, "compiled", 40, 2, **options)
    assert row["why"] == "RuntimeError: no compiler"


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


def test_a_token_is_timed_beside_llamas() -> None:
    rows = take(decode.llama_steps("tiny", layouts=["rope"], repeats=3, seed=0))
    assert [row["model"] for row in rows] == ["llama", "rope"]
    assert rows[0]["median"] == 1.0
    assert rows[1]["low"] <= rows[1]["median"] <= rows[1]["high"]


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


def test_the_complete_model_is_timed_in_turn_and_its_window_weighed() -> None:
    options: dict[str, Any] = {"variants": ("rope", "coca-exact"), "device": "cpu"}
    rope, coca = take(model.training("tiny", rows=2, length=16, repeats=3, compile=False, **options))
    assert rope["time_over_rope"] == 1.0
    assert coca["range_over_rope"]["low"] <= coca["time_over_rope"] <= coca["range_over_rope"]["high"]
    assert all(row["error"] <= row["allowed"] for row in (rope, coca))
    assert coca["parameters"] < rope["parameters"]
    assert all(len(row["seconds"]) == 3 and 0 < row["mfu"] < 1 for row in (rope, coca))
    read, _ = take(model.window("tiny", length=300, chunk=64, **options))
    assert read["peak_bytes"] >= read["weight_bytes"] == 4 * rope["parameters"]


def test_bodies_of_layouts_are_timed_beside_full_rope() -> None:
    options: dict[str, Any] = {"window": 16, "global_every": 2, "repeats": 2, "device": "cpu", "seed": 0}
    rows = take(model.bodies("tiny", ["hybrid-rope", "hybrid-pope"], [40], compile=False, **options))
    assert [(row["kind"], row["attention"]) for row in rows] == [
        ("body", "rope"), ("body", "hybrid-rope"), ("body", "hybrid-pope"),
    ]  # fmt: skip
    assert all(row["gradient_error"] <= row["gradient_allowed"] and row["window"] == 16 for row in rows)
    assert "hybrid-pope" in str(model.tables(rows))
