"""The benchmark of decoding takes every step at toy size, and keeps silent when a mode computes something else."""

import gc
import io
import json
import sys
import time
import weakref

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from farspan import FarspanCache, FarspanConfig, FarspanForCausalLM
from farspan.benchmark import decode
from farspan.benchmark.agree import ResultsDifferError
from farspan.layers import Attention
from farspan.ops.coca import COCA, decode_triton
from farspan_cli import main
from farspan_cli.bench_gpu import show_decode

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {"contexts": [40], "batches": [2], "prompts": [], "repeats": 2}


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer, since torch.compile takes a second for each."""
    make = FarspanConfig.preset
    monkeypatch.setattr(FarspanConfig, "preset", lambda name, **options: make(name, num_hidden_layers=1, **options))


@pytest.mark.usefixtures("shallow")
def test_every_step_at_toy_size() -> None:
    steps = list(decode.run("tiny", **(SMALL | {"prompts": [100]})))
    assert [done for done, _ in steps] == [
        "half-width kernel", "eager, 2 × 40 tokens", "graph, 2 × 40 tokens", "compiled, 2 × 40 tokens",
        "best, 2 × 40 tokens", "prompt of 100 tokens",
    ]  # fmt: skip
    rows = [row for _, new in steps for row in new]
    found = [row for row in rows if row["kind"] == "decode"]
    assert [(row["mode"], row["attention"]) for row in found] == [
        (mode, variant) for mode in ("eager", "compiled") for variant in decode.VARIANTS
    ]
    for row in found:
        assert row["cache_over_rope"] == (0.75 if row["attention"] == "coca-exact" else 1.0)
        assert row["decodes_on"] == "SDPA"
        assert row["reads"] == ("text" if row["mode"] == "eager" else "all 128 slots, masked")
        assert row["tokens_per_second"] == pytest.approx(2e3 / row["milliseconds_a_step"]["median"])
        assert row["greedy_equal"] == 1.0
        rate = row["bytes_a_step"] / row["milliseconds_a_step"]["median"] / 1e9
        assert row["terabytes_a_second"] == pytest.approx(rate)
        assert row["of_copy"] == pytest.approx(rate / max(row["copy_terabytes_a_second"].values()))
        assert row["peak_bytes"] >= row["cache_bytes"] + row["weight_bytes"]
    [fastest] = [row["each"] for row in rows if row["kind"] == "best"]
    for name, chosen in fastest.items():
        speeds = [row["tokens_per_second"] for row in found if row["attention"] == name]
        assert chosen["tokens_per_second"] == max(speeds)
        assert (chosen["reads"] == "text") is (chosen["mode"] == "eager")
    assert fastest["rope"]["speed_over_rope"] == 1.0
    console = Console(file=io.StringIO(), width=300)
    show_decode(console, rows, absolute=True)
    assert "missing: graph: CUDA graphs need a CUDA device" in console.file.getvalue()
    assert "missing: half-width kernel: kernels need a CUDA device" in console.file.getvalue()
    assert "best of all modes over RoPE's, 2 × 40 tokens: rope (" in console.file.getvalue()
    assert "coca-exact, a prompt of 100 tokens: " in console.file.getvalue()


def test_grouped_heads_of_another_width_are_timed_end_to_end() -> None:
    steps = decode.run("tiny", **(SMALL | {"prompts": [50]}), compile="none", group=2, head_dim=16)
    rows = [row for _, new in steps for row in new if row["kind"] in ("decode", "best", "prefill")]
    assert {row["kind"] for row in rows} == {"decode", "best", "prefill"}
    assert all((row["heads"], row["key_heads"], row["head_dim"]) == (8, 4, 16) for row in rows)
    [rope] = [row for row in rows if row["kind"] == "decode" and row["attention"] == "rope"]
    slots = rope["cache_bytes"] // (2 * 4 * 4 * 16 * 4 * 2)  # texts, layers, key heads, width, bytes, k and v
    assert slots >= 40
    assert rope["cache_bytes"] % (2 * 4 * 4 * 16 * 4 * 2) == 0
    for wrong, message in (({"group": 3}, "group must divide the 4 heads, got 3"), ({"head_dim": 48}, "head_dim must")):
        with pytest.raises(ValueError, match=message):
            next(decode.run("tiny", **SMALL, **wrong))


@pytest.mark.parametrize(("compile", "expected"), [("none", set()), ("one", {(50, 2)}), ("all", {(50, 2), (50, 1)})])
def test_what_is_compiled(monkeypatch: pytest.MonkeyPatch, compile: str, expected: set) -> None:
    asked = []
    monkeypatch.setattr(decode, "decode", lambda models, *where, **options: asked.append(where) or [])
    monkeypatch.setattr(decode, "best", lambda rows: [])
    list(decode.run("tiny", contexts=[20, 50], batches=[2, 1], prompts=[], compile=compile))
    compiled = {(context, batch) for mode, context, batch in asked if mode == "compiled"}
    assert compiled == (expected | {(20, 2), (20, 1)} if compile == "all" else expected)
    assert sum(mode == "eager" for mode, *_ in asked) == 4


@pytest.mark.parametrize("variant", decode.VARIANTS)
@torch.no_grad()
def test_both_caches_hold_the_same_context_and_can_be_rewound(variant: str) -> None:
    """A static cache gives the growing one's logits, also after it went on and came back."""
    model = decode.make_model("tiny", variant, "cpu", 0)
    tokens = torch.randint(0, 512, (3, 2))
    logits = []
    for mode in ("eager", "graph"):
        decoder = decode.Decoder(model, mode, 40, 2, room=20, seed=1)
        logits.append(decoder.follow(tokens))
        decoder.several()
        decoder.rewind()
        logits.append(decoder.follow(tokens))
    assert all((x - logits[0]).abs().max() <= 1e-5 for x in logits)
    truth = decode.exact(decoder, tokens, 2, 1)
    assert (logits[0][:, 0] - truth).abs().max() <= 1e-5
    other = FarspanCache(model.config)
    decode.fill(other, model.config, 2, 40, 2, model.lm_head.weight)
    assert not torch.equal(other.layers[0].values, decoder.cache.layers[0].values[:, :, :40])


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("variant", decode.VARIANTS)
def test_a_step_reads_its_weights_and_its_cache(variant: str, mode: str) -> None:
    """In a growing cache the context, in a static one on SDPA every slot; of a tied embedding the head."""
    model = decode.make_model("tiny", variant, "cpu", 0)
    decoder = decode.Decoder(model, mode, 128, 2, room=20, seed=1)
    table = 0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.nbytes
    weights = sum(p.nbytes for p in model.parameters()) - table
    assert decoder.bytes_a_step == weights + decoder.cache.nbytes


@pytest.fixture
def on_the_kernel() -> FarspanForCausalLM:
    """A model that decodes on the kernel, in Triton's interpreter where there is no GPU."""
    pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")
    options = {"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 16, "vocab_size": 64}
    config = FarspanConfig.preset("tiny", decode_backend="triton", **options)
    return FarspanForCausalLM(config).eval().to("cuda" if torch.cuda.is_available() else "cpu")


def test_every_cache_gives_the_same_logits_on_the_kernel(on_the_kernel: FarspanForCausalLM) -> None:
    eager: decode.Eager = {}
    for mode in ("eager", "graph"):  # a static cache; a graph of it is captured by `settle`
        decoder = decode.Decoder(on_the_kernel, mode, 40, 1, room=20, seed=0)
        assert (decoder.decodes_on, decoder.reads) == ("half-width kernel", "text")
        found = decode.check(decoder, "coca-exact", mode, 1, 0, eager)
        assert decoder.cache.get_seq_length() == 40 + decode.CHECKED
        assert found["logit_error"] <= 1e-5
        assert found["logit_difference"] <= 1e-5


def test_no_figures_of_a_kernel_that_is_wrong(
    on_the_kernel: FarspanForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = [
        entry._replace(run=lambda call: 1.05 * decode_triton(call)) if entry.name == "decode_triton" else entry
        for entry in COCA.entries
    ]
    monkeypatch.setattr(COCA, "entries", wrong)
    decoder = decode.Decoder(on_the_kernel, "eager", 40, 1, room=20, seed=0)
    with pytest.raises(ResultsDifferError, match="coca-exact, half-width kernel: logits are wrong by"):
        decode.check(decoder, "coca-exact", "eager", 1, 0, {})


def test_no_figures_of_steps_that_are_wrong_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = Attention.attend
    monkeypatch.setattr(  # float64, which is the truth, stays right
        Attention,
        "attend",
        lambda self, q, *args, **options: compute(self, q, *args, **options) * (q.element_size() // 8),
    )
    decoder = decode.Decoder(decode.make_model("tiny", "rope", "cpu", 0), "eager", 40, 1, room=20, seed=0)
    with pytest.raises(ResultsDifferError, match="rope, a decoding step"):
        decode.check(decoder, "rope", "eager", 1, 0, {})


def test_the_fastest_order_of_kernels_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decode.Decoder(decode.make_model("tiny", "rope", "cpu", 0), "eager", 40, 1, room=60, seed=0)
    assert decode.orders_for(decoder, "cpu") == [None]
    assert decode.orders_for(decoder, "cuda") == ["flash", "cudnn"]
    several = decoder.several
    monkeypatch.setattr(decoder, "several", lambda: several() or time.sleep(0.2 * (decoder.order == "flash")))
    assert decoder.settle("cpu", ["flash", "cudnn"], graph=False) == "cudnn"
    assert decoder.decodes_on == "SDPA, cudnn first"
    assert decoder.cache.get_seq_length() == 40
    decoder.step()


def test_a_decoder_takes_its_cache_along() -> None:
    """At once: the next mode's would not fit beside it."""
    decoder = decode.Decoder(decode.make_model("tiny", "rope", "cpu", 0), "eager", 40, 1, room=60, seed=0)
    decoder.settle("cpu", [None], graph=False)
    decoder.several()
    cache = weakref.ref(decoder.cache)
    gc.disable()
    try:
        del decoder
        assert cache() is None
    finally:
        gc.enable()


def test_the_peak_is_that_of_the_step_that_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the order of kernels that was chosen, and, as at first, without room in the growing cache."""
    monkeypatch.setattr(decode, "orders_for", lambda decoder, device: ["flash", "cudnn"])
    settle, measure, found = decode.Decoder.settle, decode.measure, []

    def settle_on_cudnn(self: decode.Decoder, *args, **options) -> str:
        settle(self, *args, **options)
        self.order = "cudnn"
        return self.order

    def look(call, **options):
        decoder = call.__self__
        found.append((decoder.order, decoder.cache.get_seq_length(), decoder.cache.layers[0]._storage[0].buffer))
        return measure(call, **options)

    monkeypatch.setattr(decode.Decoder, "settle", settle_on_cudnn)
    monkeypatch.setattr(decode, "measure", look)
    models = {"rope": decode.make_model("tiny", "rope", "cpu", 0)}
    [row] = decode.decode(models, "eager", 40, 1, repeats=1, device="cpu", seed=0, eager={}, orders={})
    assert found == [("cudnn", 40, None)]
    assert row["decodes_on"] == "SDPA, cudnn first"


def test_greedy_tokens_go_on_from_each_other() -> None:
    model = decode.make_model("tiny", "coca-exact", "cpu", 0)
    decoder = decode.Decoder(model, "eager", 40, 1, room=20, seed=0)
    decoder.step()
    chosen = decoder.token.clone()
    decoder.several()
    assert chosen.item() == decode.Decoder(model, "eager", 40, 1, room=20, seed=0).follow(torch.tensor([[0]])).argmax()
    assert decoder.cache.get_seq_length() == 40 + 1 + decode.AT_ONCE


def test_no_figures_when_a_mode_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    follow = decode.Decoder.follow

    def off(self: decode.Decoder, tokens: torch.Tensor) -> torch.Tensor:
        static = self.cache.layers[0].is_compileable
        return follow(self, tokens) + static * 0.01 * torch.randn(self.logits.shape)

    monkeypatch.setattr(decode.Decoder, "follow", off)
    models = {"rope": decode.make_model("tiny", "rope", "cpu", 0)}
    eager: decode.Eager = {}
    options = {"repeats": 1, "device": "cpu", "seed": 0, "eager": eager, "orders": {}}
    decode.decode(models, "eager", 40, 2, **options)
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    with pytest.raises(ResultsDifferError, match="rope, compiled: logits differ from the eager ones by"):
        decode.decode(models, "compiled", 40, 2, **options)


def test_no_figures_when_a_prompt_is_read_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are timed as often as asked, and what the last reading ended with is compared."""
    models = {name: decode.make_model("tiny", name, "cpu", 0) for name in ("rope", "coca-exact")}
    monkeypatch.setattr(decode, "CHUNK", 16)
    rows = decode.prefill(models, 40, device="cpu", repeats=5)
    assert all(len(row["seconds"]) == 5 and row["error_as_timed"] <= 1e-5 for row in rows)
    right = F.scaled_dot_product_attention

    def attend(q, *args, **options):
        return right(q, *args, **options) * (q.dtype == torch.float64)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    with pytest.raises(ResultsDifferError, match="rope, a prompt of 40 tokens: what is timed differs"):
        decode.prefill(models, 40, device="cpu", repeats=1)


def test_a_mode_that_cannot_run_is_missing_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model, **_):
        raise RuntimeError("no compiler\nsecond line")

    monkeypatch.setattr(torch, "compile", broken)
    models = {"rope": decode.make_model("tiny", "rope", "cpu", 0)}
    [row] = decode.decode(models, "compiled", 40, 1, repeats=1, device="cpu", seed=0, eager={}, orders={})
    assert row["why"] == "RuntimeError: no compiler"


def test_the_command_writes_its_rows(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys) -> None:
    out = tmp_path / "decode.json"
    options = ["--preset", "tiny", "--contexts", "16,32", "--batch", "1", "--prompts", "64,128", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["farspan", "bench", "decode", *options, "--quick", "--out", str(out)])
    with pytest.raises(SystemExit) as done:
        main()
    assert not done.value.code
    kinds = [(row["kind"], row.get("context") or row.get("length")) for row in json.loads(out.read_text())["rows"]]
    assert kinds == [
        ("missing", None), *[("decode", 32)] * 2, ("missing", 32), ("best", 32), *[("prefill", 64)] * 2,
    ]  # fmt: skip
    assert "missing: graph" in capsys.readouterr().out
