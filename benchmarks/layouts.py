"""Time whole layouts and single window layers against full RoPE attention and FlexAttention, in one run.

python benchmarks/layouts.py --out layouts.json [--parts body,prefill,decode,layer] [--device cpu]

Body: the 350M model without its head, forward and backward in bfloat16, blocks compiled. Prefill: a prompt in chunks
through a growing cache. Decode: one token for each of eight sequences, in a CUDA graph with a static cache, and eager
with a growing one. Layer: one attention layer with projections, window 128, compiled. All are timed in turn.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farspan import FarspanCache, FarspanConfig, FarspanForCausalLM
from farspan.benchmark.clock import captured
from farspan.benchmark.measure import in_turn, measure
from farspan.benchmark.record import parse_script, recorded
from farspan.layers import Attention, AttentionSpec
from farspan.ops.masking import make_mask
from farspan.training.optimizer import compile_blocks

LAYOUTS = ("rope", "coca-exact", "hybrid-rope", "hybrid-coca-exact", "hybrid-pope")
WINDOW = 128
Rows = Iterator[tuple[str, list[dict[str, Any]]]]


def make(layout: str, device: str, preset: str) -> FarspanForCausalLM:
    torch.manual_seed(0)
    options = {"window": WINDOW, "global_every": 4} if layout.startswith("hybrid") else {}
    return FarspanForCausalLM(FarspanConfig.preset(preset, attention=layout, **options)).to(device)


def against(seconds: dict[str, list[float]], first: str) -> dict[str, dict[str, Any]]:
    """Return medians, and the median ratio of each round's time to the first's: above 1 is faster than the first."""
    return {
        name: {
            "seconds": statistics.median(found),
            f"speed_over_{first}": statistics.median(a / b for a, b in zip(seconds[first], found, strict=True)),
        }
        for name, found in seconds.items()
    }


def body(layouts: list[str], device: str, preset: str, shapes: list[tuple[int, int]], repeats: int) -> Rows:
    for rows, length in shapes:
        calls: dict[str, Callable[[], Any]] = {}
        peaks = {}
        torch.compiler.reset()
        for layout in layouts:
            model = make(layout, device, preset).train()
            compile_blocks(model)
            ids = torch.randint(0, model.config.vocab_size, (rows, length), device=device)
            calls[layout] = partial(forward_backward, model, ids, device)
            calls[layout]()
            peaks[layout] = measure(calls[layout], repeats=0, device=device).peak_bytes
        found = against(in_turn(calls, repeats=repeats, device=device), "rope")
        label = {"kind": "body", "preset": preset, "rows": rows, "length": length, "window": WINDOW}
        yield (
            f"body, {rows} × {length}",
            [
                label | {"layout": name, "tokens_per_second": rows * length / row["seconds"], **row}
                | {"peak_bytes": peaks[name]}
                for name, row in found.items()
            ],
        )  # fmt: skip


def forward_backward(model: FarspanForCausalLM, ids: Tensor, device: str) -> None:
    with torch.autocast(device, torch.bfloat16):
        hidden = model.model(ids, use_cache=False).last_hidden_state
    hidden.float().square().mean().backward()
    model.zero_grad(set_to_none=True)


@torch.no_grad()
def read(model: FarspanForCausalLM, ids: Tensor, cache: FarspanCache, chunk: int = 8192) -> Tensor:
    for piece in ids.split(chunk, dim=1):
        logits: Tensor = model(piece, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    return logits


def prefill(layouts: list[str], device: str, preset: str, lengths: list[int], repeats: int) -> Rows:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    models = {layout: make(layout, device, preset).eval().to(dtype) for layout in layouts}
    for length in lengths:
        ids = torch.randint(0, 500, (1, length), device=device)
        calls = {name: partial(fresh_read, model, ids) for name, model in models.items()}
        held = {name: call() for name, call in calls.items()}
        found = against(in_turn(calls, repeats=repeats, device=device), "rope")
        label = {"kind": "prefill", "preset": preset, "rows": 1, "length": length, "window": WINDOW}
        yield (
            f"prefill, {length}",
            [
                label | {"layout": name, **row, "cache_bytes": held[name]}
                | {"cache_over_rope": held[name] / held["rope"]}
                for name, row in found.items()
            ],
        )  # fmt: skip


def fresh_read(model: FarspanForCausalLM, ids: Tensor) -> int:
    cache = FarspanCache(model.config)
    read(model, ids, cache)
    return cache.nbytes


def decode(layouts: list[str], device: str, preset: str, batch: int, context: int, repeats: int) -> Rows:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    calls: dict[str, Callable[[], Any]] = {}
    agreement, held = {}, []
    for layout in layouts:
        model = make(layout, device, preset).eval().to(dtype)
        ids = torch.randint(0, 500, (batch, context), device=device)
        token = torch.zeros(batch, 1, dtype=torch.long, device=device)
        logits = {}
        for mode in ("eager", "graph"):
            cache = FarspanCache(model.config, max_length=context + 1024 if mode == "graph" else None)
            read(model, ids, cache)
            out = torch.empty(batch, model.config.vocab_size, device=device, dtype=dtype)
            step = partial(one_token, model, token, cache, out)
            held.append((model, cache, token, out))  # a graph keeps none of the tensors that it reads
            step()
            if mode == "graph" and device == "cuda":
                step = captured(step)  # type: ignore[assignment]
                logits["eager"] = again(logits.pop("eager step"), logits.pop("eager out"), 2)
            elif mode == "eager":
                logits["eager step"], logits["eager out"] = step, out
            calls[f"{layout}, {mode}"] = partial(several, step)
            if mode == "graph":
                step()
                if device == "cuda":
                    difference = (out - logits["eager"]).abs().max() / logits["eager"].abs().max()
                    agreement[layout] = float(difference)
    seconds = in_turn(calls, repeats=repeats + 1, device=device)
    found = against({name: [x / 8 for x in times[1:]] for name, times in seconds.items()}, "rope, graph")
    label = {"kind": "decode", "preset": preset, "rows": batch, "context": context, "window": WINDOW}
    rows = []
    for name, row in found.items():
        layout, mode = name.split(", ")
        more = {"graph_against_eager": agreement.get(layout)} if mode == "graph" else {}
        rows.append(label | {"layout": layout, "mode": mode, "tokens_per_second": batch / row["seconds"]} | row | more)
    yield f"decode, {batch} × {context}", rows


def again(step: Callable[[], Any], out: Tensor, times: int) -> Tensor:
    for _ in range(times):
        step()
    return out.clone()


def several(step: Callable[[], Any]) -> None:
    for _ in range(8):
        step()


@torch.no_grad()
def one_token(model: FarspanForCausalLM, token: Tensor, cache: FarspanCache, out: Tensor) -> None:
    out.copy_(model(token, past_key_values=cache).logits[:, -1])


class FlexLayer(Attention):
    """The same layer, its attention by FlexAttention."""

    block_mask: Any = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, rotary: Any) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        q, k = self.features(q, k, make_mask(q.shape[2], k.shape[2], q.shape[0], q.device), rotary)
        return flex_attention(q, k, v, block_mask=self.block_mask, scale=self.scaling)  # type: ignore[return-value]


def layer(device: str, shapes: list[tuple[int, int]], repeats: int) -> Rows:
    from torch.nn.attention.flex_attention import create_block_mask

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for rows, length in shapes:
        torch.compiler.reset()
        torch.manual_seed(0)
        hidden, heads = (1024, 16) if device == "cuda" else (64, 2)
        layers: dict[str, Attention] = {
            "rope": Attention(hidden, heads, AttentionSpec("rope")),
            "rope, window": Attention(hidden, heads, AttentionSpec("rope", window=WINDOW)),
            "coca-exact, window": Attention(hidden, heads, AttentionSpec("coca", "exact", window=WINDOW)),
            "pope, window": Attention(hidden, heads, AttentionSpec("pope", window=WINDOW)),
        }
        if device == "cuda":
            flex = layers["rope, window, flex"] = FlexLayer(hidden, heads, AttentionSpec("rope", window=WINDOW))
            flex.load_state_dict(layers["rope, window"].state_dict())
            flex.block_mask = torch.compile(create_block_mask)(
                lambda b, h, i, j: (i >= j) & (i - j < WINDOW), None, None, length, length, device=device
            )
        x = torch.randn(rows, length, hidden, device=device).to(dtype)
        for passes in ("forward", "forward and backward"):
            calls, outputs, peaks = {}, {}, {}
            for name, module in layers.items():
                if name == "rope" and length > 32_768:
                    continue
                run = torch.compile(module.to(device, dtype), dynamic=False) if device == "cuda" else module.to(dtype)
                calls[name] = partial(one_layer, run, x, passes)
                outputs[name] = calls[name]()
                peaks[name] = measure(calls[name], repeats=0, device=device).peak_bytes
            difference = None
            if device == "cuda":
                ours, theirs = outputs["rope, window"], outputs["rope, window, flex"]
                difference = float((ours - theirs).abs().max() / theirs.abs().max())
            found = against(in_turn(calls, repeats=repeats, device=device), "rope, window")
            label = {"kind": "layer", "rows": rows, "length": length, "window": WINDOW, "passes": passes}
            yield (
                f"layer, {rows} × {length}, {passes}",
                [
                    label | {"layer": name, **row, "peak_bytes": peaks[name], "ours_against_flex": difference}
                    for name, row in found.items()
                ],
            )


def one_layer(run: Any, x: Tensor, passes: str) -> Tensor:
    if passes == "forward":
        with torch.no_grad():
            return run(x)  # type: ignore[no-any-return]
    leaf = x.detach().requires_grad_()
    run(leaf).float().square().mean().backward()
    assert leaf.grad is not None
    return leaf.grad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", default="body,prefill,decode,layer")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="the first must be rope")
    arguments = parse_script(parser)
    layouts = arguments.layouts.split(",")
    device, repeats, parts = arguments.device, arguments.repeats, arguments.parts.split(",")
    torch._dynamo.config.recompile_limit = 64
    gpu = device == "cuda"
    preset = "350m" if gpu else "tiny"
    found = {
        "body": lambda: body(
            layouts, device, preset, [(2, 8192), (64, 512), (1, 32_768)] if gpu else [(2, 200)], repeats
        ),
        "prefill": lambda: prefill(layouts, device, preset, [32_768, 131_072] if gpu else [300], max(3, repeats // 4)),
        "decode": lambda: decode(layouts, device, preset, *((8, 32_768) if gpu else (2, 300)), repeats),
        "layer": lambda: layer(
            device, [(64, 512), (16, 2048), (4, 8192), (1, 32_768), (1, 131_072)] if gpu else [(1, 300)], repeats
        ),
    }
    steps = (step for part in parts for step in found[part]())
    for done, rows in recorded(steps, arguments.out, device=device, seed=0):
        print(done)
        for row in rows:
            speed = next(value for key, value in row.items() if key.startswith("speed_over"))
            print(f"  {row.get('layout', row.get('layer')):24} {row.get('mode', ''):6} {1e3 * row['seconds']:9.3f} ms "
                  f"{speed:6.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
