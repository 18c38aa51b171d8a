"""Attention on long sequences. On a CPU: layers, reading, decoding, and CoCA as it was published, in float32.

With a window or layouts: the op alone against full RoPE and other libraries' windows. On a GPU: the half-width kernel.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from farspan.bench import Row, Steps, Table, decode, layer, table
from farspan.bench.checks import LOOSE, ResultsDifferError, check, definition, reason, worst
from farspan.bench.layer import KERNELS, PASSES, Peer, candidates, show
from farspan.bench.timing import best, copy_speed, memory_ratio, quantiles, ratio, time_candidates
from farspan.errors import require
from farspan.layers import Attention, AttentionSpec, hybrid
from farspan.ops import Rotary, coca_attention, coca_attention_reference
from farspan.ops.device import assembler
from farspan.ops.masking import make_mask

HEADS, WIDTH = 8, 64
LAST = 4
"""Queries of a timed call that are compared with float64: the equations take N×d numbers for each."""
SPECS = {
    **{name: AttentionSpec.parse(name) for name in ("rope", "coca-exact", "coca-slack")},
    "coca-exact, window 512": AttentionSpec("coca", "exact", window=512),
    "alibi": AttentionSpec("alibi"),
}
MODELS = ("rope", "coca-exact", "coca-slack")
PREFILL_LENGTHS, DECODE_LENGTHS = (512, 2048), (512, 2048, 8192)


def steps(lengths: Sequence[int], published_length: int, *, repeats: int, device: str, seed: int) -> Steps:
    """Time the op at each length, two layers that read and decode, and the published formulation; on a CPU."""
    settings: dict[str, Any] = {"repeats": repeats, "device": device, "seed": seed}
    found: Steps = []
    for n in lengths:
        shape = layer.Shape(1, n, HEADS * WIDTH, HEADS, HEADS)
        found.append((f"forward, {n:,} tokens", partial(compare, shape, PASSES[0], SPECS, **settings)))
    for kind, word, sizes in (("prefill", "reading", PREFILL_LENGTHS), ("decode", "one token after", DECODE_LENGTHS)):
        found += [(f"{word} {n:,}", partial(two_layers, kind, n, **settings)) for n in sizes]
    label = f"published formulation, {published_length:,} tokens"
    return [*found, (label, partial(against_published, published_length, **settings))]


def window_steps(
    lengths: Sequence[int],
    window: int,
    layouts: Sequence[str] = (),
    global_every: int = 4,
    *,
    repeats: int,
    device: str,
    seed: int,
) -> Steps:
    """Time windows of `window` keys against full RoPE at each length, forward and with gradients.

    A layout stands for one period of its layers, local ones and a global one; its time is that of a layer on average.
    On a GPU all are compiled, and bfloat16.
    """
    parts = {name: layout_specs(name, window, global_every) for name in layouts if name != "rope"}
    found: Steps = []
    for n in lengths:
        b, (hidden, h) = (max(1, 32_768 // n), layer.WINDOW_WIDTH) if device == "cuda" else (1, (256, 4))
        shape = layer.Shape(b, n, hidden, h, h)
        for passes in PASSES:
            settings: dict[str, Any] = {"repeats": repeats, "device": device, "seed": seed}
            work = partial(compare, shape, passes, {}, window=window, layouts=parts, **settings)
            found.append((f"window {window}, {passes}, {b} × {n:,}", work))
    return found


def layout_specs(name: str, window: int | None, global_every: int) -> list[AttentionSpec]:
    """Return one period of a layout's layers; of a plain attention as many equal ones.

    >>> [spec.window for spec in layout_specs("hybrid-rope", 8, 2)], len(layout_specs("pope", 8, 2))
    ([8, None], 2)
    """
    if not name.startswith("hybrid"):
        return [AttentionSpec.parse(name)] * global_every
    specs = hybrid(name, global_every, window=window, global_every=global_every)
    require(not any(spec.linear for spec in specs), f"layouts must have a softmax in every layer, got {name!r}")
    return specs


def compare(
    shape: layer.Shape,
    passes: str,
    specs: Mapping[str, AttentionSpec],
    *,
    window: int | None = None,
    layouts: Mapping[str, list[AttentionSpec]] = MappingProxyType({}),
    repeats: int,
    device: str,
    seed: int,
) -> list[Row]:
    """Time ops in turn, each checked at its end against float64 in the way it is timed: one row.

    Args:
        specs: what to time; with a window, windows of this library and of others instead.
        layouts: periods of layers to time as well.
    """
    torch.manual_seed(seed)
    compiled, backward = device == "cuda", passes != PASSES[0]
    dtype = torch.bfloat16 if compiled else torch.float32
    made, missing = candidates(shape, device, window=window, compiled=compiled) if window else ({}, {})
    of_layouts = {str(spec): spec for specs in layouts.values() for spec in specs}
    for name, spec in {**specs, **of_layouts}.items():
        made[name] = Attention(shape.hidden, shape.h, spec, num_key_heads=shape.g)
    x = torch.randn(shape.b, shape.n, shape.hidden, device=device).to(dtype)
    calls: dict[str, Callable[[], Any]] = {}
    checks: list[Row] = []
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=layer.ALLOWED_GRAPHS):
        for name, one in made.items():
            core = one.to(device, dtype).core if isinstance(one, Peer) else own
            run = torch.compile(core, dynamic=False) if compiled else core
            leaves = [part.detach().requires_grad_(backward) for part in one.to(device, dtype).project(x)]
            calls[name] = partial(attention_pass, one, run, leaves, backward)
            try:
                checks.append({"kind": "check", "attention": name} | check_tail(name, one, leaves, calls[name]()))
            except RuntimeError as error:
                if not isinstance(one, Peer) or isinstance(error, ResultsDifferError):
                    raise
                missing[name] = reason(error)
                del calls[name]
        for name, period in layouts.items():
            calls[name] = partial(run_all, [calls[str(spec)] for spec in period])
        calls = {name: call for name, call in calls.items() if name not in of_layouts}
        found = time_candidates(calls, repeats=repeats, device=device, required=layer.MUST_RUN, ahead=True)
    for name, period in layouts.items():
        found.seconds[name] = [x / len(period) for x in found.seconds[name]]
    row = {"kind": "op", "compiler": "inductor" if compiled else "none", "dtype": str(dtype)}
    return [*checks, row | {"passes": passes, "window": window} | layer.report(shape, found, missing)]


def own(one: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Call this library's op, mask and angles included."""
    mask = make_mask(q.shape[2], k.shape[2], q.shape[0], q.device, window=one.spec.window)
    return one.attend(q, k, v, mask, one.rotary)


def attention_pass(one: Attention, run: layer.Core, leaves: list[Tensor], backward: bool) -> tuple[Tensor, ...]:
    """Return the output, and for a training step the gradients of q, k and v."""
    with torch.set_grad_enabled(backward):
        out = run(one, *leaves)
        return (out, *torch.autograd.grad(out, leaves, gradient_like(out))) if backward else (out,)


def gradient_like(out: Tensor) -> Tensor:
    """Return a gradient of the output that changes its sign from token to token, and does not cancel."""
    weights = torch.ones_like(out)
    weights[:, :, out.shape[2] % 2 :: 2] = -1  # counted from the end
    return weights


def run_all(calls: list[Callable[[], Any]]) -> None:
    """Run the layers of a layout."""
    for call in calls:
        call()


def check_tail(name: str, one: Attention, leaves: list[Tensor], got: tuple[Tensor, ...]) -> dict[str, float]:
    """Compare the last outputs, and the gradients of the last queries and keys, with the equations in float64.

    Only the last queries see the last keys, so that nothing of the others is needed. A kernel of others must be the
    same function; ours may have twice the error of the equations in its own dtype.
    """
    found = []
    for dtype in (torch.float64, leaves[0].dtype):
        twin = copy.deepcopy(one).to(dtype)
        inputs = [x[:1].detach().to(dtype).requires_grad_() for x in leaves]
        out = definition(twin, inputs[0][:, :, -LAST:], *inputs[1:])
        gradients = torch.autograd.grad(out, inputs, gradient_like(out)) if len(got) > 1 else ()
        found.append([x.detach()[:, :, -LAST:] for x in (out, *gradients)])
    limit = LOOSE[leaves[0].dtype] if isinstance(one, Peer) else None
    parts = zip(("output", "dq", "dk", "dv"), got, *found, strict=False)
    return worst([check(f"{name}, {what},", x[:1, :, -LAST:], a, b, limit=limit) for what, x, a, b in parts])


def two_layers(kind: str, length: int, *, repeats: int, device: str, seed: int) -> list[Row]:
    """Read `length` tokens, or decode after them, in models of two layers, as `generate` does."""
    sizes = {"vocab_size": 256, "hidden_size": HEADS * WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 2}
    models = {name: decode.build(decode.make_config("350m", name, **sizes), device, seed) for name in MODELS}
    if kind == "prefill":
        return decode.prefill(models, length, device=device, repeats=2 * repeats)
    settings: dict[str, Any] = {"repeats": 2 * repeats, "device": device, "seed": seed}
    return decode.decode(models, "eager", length, 1, **settings, eager={}, orders={})


@torch.no_grad()
def against_published(length: int, *, repeats: int, device: str, seed: int) -> list[Row]:
    """Compare time and memory of slack CoCA with its published formulation, and their results with each other."""
    torch.manual_seed(seed)
    q, v = (torch.randn(1, HEADS, length, WIDTH, device=device) for _ in range(2))
    t, rotary = torch.rand(1, HEADS, length, WIDTH // 2, device=device), Rotary(WIDTH)
    calls = {
        "farspan": lambda: (coca_attention(q, t, v, rotary=rotary, form="slack"),),
        "published": lambda: (layer.published_coca(q, t, v, rotary),),
    }
    return [{"form": "slack"} | beside_published("CoCA", length, calls, repeats, device)]


def beside_published(
    name: str, length: int, calls: Mapping[str, Callable[[], tuple[Tensor, ...]]], repeats: int, device: str
) -> Row:
    """Time the calls "farspan" and "published" in turn, and compare memory and results."""
    found = time_candidates(calls, repeats=repeats, device=device, required=calls)
    times, peaks, what = found.seconds, found.peaks, f"{name} beside its published formulation, {length} tokens,"
    pairs = zip(calls["farspan"](), calls["published"](), strict=True)
    checked = worst([check(what, a.detach(), b.detach(), limit=1e-3) for a, b in pairs])
    row: Row = {"kind": "published", "length": length, "heads": HEADS, "head_dim": WIDTH, "seconds": times}
    row |= {"speedup": ratio(times["published"], times["farspan"]).median, "peak_bytes": peaks}
    return row | {"memory_ratio": memory_ratio(peaks["published"], peaks["farspan"])} | checked


# The half-width kernel of a GPU


class Shape(NamedTuple):
    """One attention call: b sequences, h query heads on g key heads of width d, n queries, m keys."""

    b: int
    h: int
    g: int
    n: int
    m: int
    d: int

    @property
    def key_bytes(self) -> tuple[int, int]:
        """Bytes of keys and values in bfloat16: CoCA's at half width, RoPE's in full."""
        token = 2 * self.b * self.g * self.m * self.d
        return token * 3 // 2, token * 2


NOTED = [Shape(8, 32, 32, 1, 32_768, 128), Shape(1, 32, 32, 1, 32_768, 128), Shape(16, 32, 32, 1, 4096, 128),
         Shape(8, 16, 16, 1, 32_768, 64), Shape(8, 32, 8, 1, 32_768, 128), Shape(8, 32, 8, 1, 32_768, 64)]  # fmt: skip
"""The decoding shapes that the project's aims name."""
LARGEST = 24e9
"""Bytes of a peer's cache beyond which a shape is left out."""
FORMS = ("exact", "slack")


def decoding_shapes() -> list[Shape]:
    """Return every length, width, group size and batch of the record that fits into memory."""
    grid = [
        Shape(b, 32, 32 // group, 1, m, d)
        for d in (64, 128)
        for group in (1, 4, 8)
        for b in (1, 8, 32)
        for m in (512, 2048, 8192, 32_768, 131_072)
    ]
    return [shape for shape in dict.fromkeys(NOTED + grid) if shape.key_bytes[1] <= LARGEST]


def kernel_steps(todo: Sequence[Shape], *, repeats: int, device: str, seed: int) -> Steps:
    """Time one decoded token: CoCA's half-width kernel against SDPA's kernels on ready RoPE keys."""
    torch.manual_seed(seed)
    return [(f"decode {tuple(shape)}", partial(time_decoding, shape, device, repeats)) for shape in todo]


@torch.no_grad()
def time_decoding(shape: Shape, device: str, repeats: int) -> list[Row]:
    """Make one row. RoPE's keys are cached rotated, and the rotation of its query is not charged to it.

    `of_copy` is a share of the better of the copies right before and after: memory has been seen 11% slower in one run
    than in another, and a ceiling too low would flatter what is held against it.
    """
    b, h, g, n, m, d = shape
    sizes = ((b, h, n, d), (b, g, m, d // 2), (b, g, m, d), (b, g, m, d))
    q, t, k, v = (torch.empty(size, dtype=torch.bfloat16, device=device).normal_() for size in sizes)
    t.relu_()
    calls: dict[str, Callable[[], Tensor]] = {
        form: partial(coca_attention, q, t, v, rotary=Rotary(d), form=form, backend="triton") for form in FORMS
    }
    calls |= rope_peers(q, k, v)
    if h > g:  # all heads of a group see the same keys: as queries of one head, they read them once
        peers = rope_peers(q.reshape(b, g, h // g * n, d), k, v)
        calls |= {f"{name}, heads as queries": call for name, call in peers.items()}
    checks = []
    for form in FORMS:  # of one sequence, whose equations fit into memory
        one, out = (q[:1], t[:1], v[:1]), calls[form]()[:1]
        truth = coca_attention_reference(*(x.double() for x in one), rotary=Rotary(d), form=form)
        plain = coca_attention(*one, rotary=Rotary(d), form=form, backend="sdpa")
        checks.append(check(f"{form}, decode {tuple(shape)},", out, truth, plain))
    size = 2**31 if device == "cuda" else 2**20
    copies = [copy_speed(device, size)]
    timed = time_candidates(calls, repeats=repeats, device=device, required=FORMS, graph=True)
    copies.append(copy_speed(device, size))
    first = best(timed.seconds, timed.fair("exact") - set(FORMS))
    half, full = shape.key_bytes
    times = {name: quantiles(seconds) for name, seconds in timed.seconds.items()}
    rate = {name: (half if name in FORMS else full) / x.median / 1e12 for name, x in times.items()}
    row: Row = {"kind": "decode", **shape._asdict(), "best_peer": first, "missing": timed.missing}
    row["milliseconds"] = {
        name: {**times[name].milliseconds, "graph": name in timed.graphs} if name in times else None for name in calls
    }
    row["speedup"] = {form: times[first].median / times[form].median for form in FORMS if first}
    row |= {"terabytes_a_second": rate, "of_copy": {form: rate[form] / max(copies) for form in FORMS}}
    row |= {"copy_terabytes_a_second": dict(zip(("before", "after"), copies, strict=True))}
    return [row | {"ptxas": ".".join(map(str, assembler())), "attention": "the worst", **worst(checks)}]


def rope_peers(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Return SDPA's kernels on ready keys; on a CPU the one it has."""
    plain = partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=q.shape[1] != k.shape[1])
    if not q.is_cuda:
        return {"sdpa": plain}
    return {name: sdpa_kernel(backend)(plain) for name, backend in KERNELS.items()}


def tables(rows: list[Row]) -> list[Table | str]:
    """Tabulate what the three kinds of runs found."""
    found = layer.tables(rows)
    found += table(
        "one token: speed over the best peer",
        [row for row in rows if "best_peer" in row and row["kind"] == "decode"],
        {
            "sequences × tokens": lambda x: f"{x['b']} × {x['m']:,}, {x['h']} × {x['d']} on {x['g']}",
            "peer": lambda x: str(x["best_peer"]),
            "exact ms": lambda x: f"{x['milliseconds']['exact']['median']:.3f}",
            **{f"{form} ×": lambda x, form=form: f"{x['speedup'].get(form, 0):.2f}" for form in FORMS},  # type: ignore[misc]
            "of copy": lambda x: f"{x['of_copy']['exact']:.0%}",
        },
    )
    found += table(
        "two layers",
        [row for row in rows if "time_over_rope" in row],
        {
            "what": lambda x: f"reading {x['length']:,}" if "length" in x else f"one token after {x['context']:,}",
            "attention": lambda x: x["attention"],
            "time / RoPE": lambda x: show(x["time_over_rope"], 2),
            "cache / RoPE": lambda x: f"{x['cache_over_rope']:.2f}",
        },
    )
    for row in (row for row in rows if row["kind"] == "published"):
        found.append(
            f"against CoCA as published, {row['length']:,} tokens: {row['speedup']:.1f}× faster, "
            f"{row['memory_ratio']:.0f}× less memory, largest difference {row['error']:.1e}"
        )
    return found
