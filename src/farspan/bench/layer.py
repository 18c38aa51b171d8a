"""One attention layer with its projections, compiled or not: this library's and others' kernels."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from farspan.bench import Row, Steps, Table, table
from farspan.bench.checks import LOOSE, check, definition, reason, worst
from farspan.bench.timing import Timed, best, quantiles, ratio, time_candidates
from farspan.errors import require
from farspan.layers import Attention, AttentionSpec
from farspan.ops import Rotary, alibi_slopes, coca_features
from farspan.ops.masking import make_mask
from farspan.ops.reference import repeat_heads

SHAPES = {512: (64, 1024, 16), 2048: (16, 1024, 16), 16_384: (2, 2048, 16), 32_768: (1, 4096, 32)}
"""Tokens → sequences, hidden width, heads: the shapes that the project's aims name."""
WINDOW_WIDTH, WINDOW_TOY = (1024, 16), (128, 2)
"""Hidden width and heads of a layer beside its window, on a GPU and elsewhere."""
FAMILIES = ("rope", "coca-exact", "coca-slack", "coca-strict", "alibi")
WINDOWED = ("rope", "coca-exact", "pope")
MUST_RUN = ("rope", "coca-exact", "coca-slack", "coca-strict", *(f"{name}, window" for name in WINDOWED))
"""If one of these fails there is no row; of the others the reason is reported."""
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
WITH_KERNEL = ("rope", "coca-exact", "coca-slack")
"""Families timed on each of SDPA's kernels by name as well, so that no ratio hangs on which one SDPA picks."""
PLAIN = ("coca-exact, plain", "coca-slack, plain")
"""Families that the library prepares with its kernel, timed without it too."""
QUICK = {*MUST_RUN, "rope, flash", "rope, cudnn", *PLAIN}
SCORES = 2**31
"""The most N×N scores for which the published formulation is run."""
UNROLLED = 4096
"""Tokens beyond which ALiBi is left out: it goes block by block, which torch.compile would unroll for minutes."""
GROUPS = (1, 2, 4, 8)
PASSES = ("forward", "forward and backward")
ALLOWED_GRAPHS = 128
"""torch.compile gives up after eight versions of one function. Here each candidate is one, with and without grad."""


class Shape(NamedTuple):
    """b sequences of n tokens, `hidden` wide, h query heads on g key heads."""

    b: int
    n: int
    hidden: int
    h: int
    g: int

    @property
    def d(self) -> int:
        return self.hidden // self.h


Core = Callable[[Attention, Tensor, Tensor, Tensor], Tensor]
"""layer, q, k or t, and v → (b, h, n, d)."""


class Peer(Attention):
    """An attention layer with the library's projections and another's attention."""

    def __init__(self, shape: Shape, spec: AttentionSpec, core: Core) -> None:
        super().__init__(shape.hidden, shape.h, spec, num_key_heads=shape.g)
        self.core = core

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.o_proj(self.core(self, *self.project(x)).transpose(1, 2).flatten(2))


def shapes(lengths: Sequence[int], groups: Sequence[int], device: str, window: int | None = None) -> list[Shape]:
    """Return the named shapes, and 32,768 tokens at a time of other lengths; on a CPU a toy of each length."""
    for group in groups:
        require(group in GROUPS, f"groups must be of {GROUPS}, query heads per key head, got {group}; choose from them")
    found = []
    for n in lengths:
        b, hidden, h = SHAPES.get(n, (max(1, 32_768 // n), 1024, 16)) if device == "cuda" else (2, 128, 8)
        if window is not None:
            b, (hidden, h) = (max(1, 32_768 // n), WINDOW_WIDTH) if device == "cuda" else (1, WINDOW_TOY)
        found += [Shape(b, n, hidden, h, max(1, h // group)) for group in groups]
    return found


def candidates(
    shape: Shape, device: str, *, window: int | None = None, compiled: bool = True
) -> tuple[dict[str, Attention], dict[str, str]]:
    """Return layers by name, and why others are left out. Layers of one spec have the same weights.

    With a window: window layers of this library and of others, beside full RoPE.
    """
    cores: dict[str, tuple[AttentionSpec, Core | None]] = {}
    missing: dict[str, str] = {}
    flex = [("rope", window)] if window is not None else [("rope", None), ("alibi", None)]
    if window is not None:
        rope = AttentionSpec("rope", window=window)
        cores["rope"] = AttentionSpec("rope"), None
        for name in WINDOWED:
            cores[f"{name}, window"] = (
                AttentionSpec.parse({**AttentionSpec.parse(name).to_dict(), "window": window}),
                None,
            )
        if device != "cuda":
            missing["rope, window, flash-attn"] = "it needs a CUDA device"
        elif find_spec("flash_attn") is None:
            missing["rope, window, flash-attn"] = "not installed; pip install flash-attn"
        else:
            cores["rope, window, flash-attn"] = rope, through_flash_attn
    else:
        cores |= {name: (AttentionSpec.parse(name), None) for name in FAMILIES}
        if shape.n > UNROLLED:
            del cores["alibi"]
            missing["alibi"] = f"its blocks would be unrolled by torch.compile beyond {UNROLLED} tokens"
        for kernel, backend in KERNELS.items():
            for name in WITH_KERNEL:
                cores[f"{name}, {kernel}"] = AttentionSpec.parse(name), through_sdpa(backend)
        if device == "cuda":
            cores |= {name: (AttentionSpec.parse(name.split(",")[0]), by_torch) for name in PLAIN}
        scores = shape.b * shape.h * shape.n**2
        if scores <= SCORES:
            cores["coca-slack, published"] = AttentionSpec.parse("coca-slack"), published
        else:
            missing["coca-slack, published"] = f"{scores:.1e} scores at once, more than {SCORES:.1e}"
    for kind, width in flex:
        name = f"{kind}, window, flex" if width else f"{kind}, flex"
        if compiled:
            cores[name] = AttentionSpec(kind, window=width), through_flex(shape, device, kind == "alibi", width)
        else:
            missing[name] = "FlexAttention is made to be compiled"
    layers: dict[str, Attention] = {}
    first: dict[AttentionSpec, Attention] = {}
    for name, (spec, core) in cores.items():
        own = partial(Attention, shape.hidden, shape.h, spec, num_key_heads=shape.g)
        layers[name] = own() if core is None else Peer(shape, spec, core)
        layers[name].load_state_dict(first.setdefault(spec, layers[name]).state_dict())
    return layers, missing


def features(layer: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Bring q and k into dot-product form, as the library does."""
    return layer.features(q, k, make_mask(q.shape[2], k.shape[2], q.shape[0], q.device), layer.rotary)


def sdpa(layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention to ready keys, on the kernel that is allowed or chosen."""
    grouped = layer.num_heads != layer.num_key_heads
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scaling, enable_gqa=grouped)


def through_sdpa(backend: SDPBackend) -> Core:
    """Take SDPA's kernel of that name and no other, on rotated queries and keys."""

    def core(layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(layer, *features(layer, q, k), v)

    return core


def by_torch(layer: Attention, q: Tensor, t: Tensor, v: Tensor) -> Tensor:
    """Compute CoCA's features by plain torch from tables of angles, for torch.compile to fuse."""
    assert layer.rotary is not None
    angles = make_mask(q.shape[2], t.shape[2], q.shape[0], q.device).angles(layer.rotary)
    return sdpa(layer, *coca_features(q, t, angles.query(q.dtype), angles.key(q.dtype), form=layer.form), v)


def through_flex(shape: Shape, device: str, alibi: bool = False, window: int | None = None) -> Core:
    """Take FlexAttention with a block mask, made once; ALiBi is its score modification."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key if window is None else (query >= key) & (query - key < window)

    make = torch.compile(create_block_mask) if device == "cuda" else create_block_mask  # else N×N numbers are made
    mask = make(seen, None, None, shape.n, shape.n, device=device)
    slopes = alibi_slopes(shape.h, device=device)

    def lowered(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score - slopes[h] * (query - key)

    def core(layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = features(layer, q, k)
        grouped, change = layer.num_heads != layer.num_key_heads, lowered if alibi else None
        out = flex_attention(q, k, v, score_mod=change, block_mask=mask, scale=layer.scaling, enable_gqa=grouped)
        assert isinstance(out, Tensor)
        return out

    return core


def through_flash_attn(layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Take flash-attn's window, where it is installed."""
    from flash_attn import flash_attn_func  # type: ignore[import-not-found]

    assert layer.spec.window is not None
    q, k, v = (x.transpose(1, 2) for x in (*features(layer, q, k), v))
    reach = (layer.spec.window - 1, 0)
    return flash_attn_func(q, k, v, softmax_scale=layer.scaling, causal=True, window_size=reach).transpose(1, 2)


def published(layer: Attention, q: Tensor, t: Tensor, v: Tensor) -> Tensor:
    """Compute slack CoCA with all N×N scores, as its authors run it."""
    assert layer.rotary is not None
    return published_coca(q, repeat_heads(t, q.shape[1]), repeat_heads(v, q.shape[1]), layer.rotary)


def published_coca(q: Tensor, t: Tensor, v: Tensor, rotary: Rotary) -> Tensor:
    """Compute slack CoCA by a three-operand contraction, N×N scores and full-width t (Eq. 18)."""
    n, width = q.shape[2], q.shape[3]
    angles = make_mask(n, n, q.shape[0], q.device).angles(rotary)
    keys = angles.rotate_keys(torch.cat((t, t), dim=-1))
    scores = torch.einsum("bhid,bhid,bhjd->bhij", angles.rotate_queries(q), q, keys) * width**-0.5
    causal = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    return torch.softmax(torch.where(causal, scores, torch.finfo(scores.dtype).min), dim=-1) @ v


def steps(
    todo: Sequence[Shape],
    *,
    repeats: int = 20,
    only: Collection[str] | None = None,
    window: int | None = None,
    device: str = "cpu",
    seed: int = 0,
    dtype: torch.dtype | None = None,
    eager: bool = False,
) -> Steps:
    """Check small layers against float64, then time each shape in both passes.

    bfloat16 and Inductor on a GPU. Elsewhere float32, where torch.compile only traces, and windows are not compiled.

    Args:
        only: whom to time, by name; all are checked in any case.
        window: time window layers of this width beside full RoPE.
        eager: compile nothing.
    """
    torch.manual_seed(seed)
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    compiler = "inductor" if device == "cuda" else "aot_eager" if window is None else None
    how: dict[str, Any] = {"device": device, "dtype": dtype, "window": window}
    timing = how | {"repeats": repeats, "only": only, "compiler": None if eager else compiler}
    small = dict.fromkeys(Shape(2, 200, 8 * x.d, 8, max(1, 8 * x.g // x.h)) for x in todo)
    found: Steps = [(f"width {x.d} against float64", partial(check_small, x, **how)) for x in small]
    timed = ((x, passes) for x in todo for passes in PASSES)
    return found + [(f"{passes}, {x.b} × {x.n:,}", partial(compare, x, passes, **timing)) for x, passes in timed]


def results(layer: Attention, run: Callable[[Tensor], Tensor], x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Return output and gradients, for a given gradient of the output."""
    x = x.detach().requires_grad_()
    out = run(x)
    names, leaves = zip(*layer.named_parameters(), strict=True)
    gradients = torch.autograd.grad(out, [x, *leaves], weights)
    return {"output": out.detach(), **dict(zip(("d input", *(f"d {name}" for name in names)), gradients, strict=True))}


def check_small(shape: Shape, device: str, dtype: torch.dtype, window: int | None = None) -> list[Row]:
    """Check output and gradients of each candidate against the equations in float64.

    A layer on another's kernel must only be the same function: how exactly it computes is not ours to judge.
    """
    layers, _ = candidates(shape, device, window=window and min(window, 60))
    x = torch.randn(shape.b, shape.n, shape.hidden, device=device).to(dtype)
    weights = torch.randn_like(x)
    truths: dict[AttentionSpec, list[dict[str, Tensor]]] = {}
    rows = []
    for name, layer in layers.items():
        layer.to(device, dtype)
        if layer.spec not in truths:
            twins = [Peer(shape, layer.spec, definition).to(device, wide) for wide in (torch.float64, dtype)]
            truths[layer.spec] = []
            for twin, wide in zip(twins, (torch.float64, dtype), strict=True):
                twin.load_state_dict(layer.state_dict())
                truths[layer.spec].append(results(twin, twin, x.to(wide), weights.to(wide)))
        truth, plain = truths[layer.spec]
        row: Row = {"kind": "check", "attention": name, **shape._asdict()}
        try:
            got = results(layer, layer, x, weights)
        except RuntimeError as failure:
            if name in MUST_RUN:
                raise
            rows.append(row | {"missing": reason(failure)})
            continue
        limit = LOOSE[dtype] if isinstance(layer, Peer) and layer.core is not by_torch else None
        rows.append(row | worst([check(f"{name}, {x},", got[x], truth[x], plain[x], limit=limit) for x in truth]))
    return rows


def compare(
    shape: Shape,
    passes: str,
    *,
    compiler: str | None,
    device: str,
    dtype: torch.dtype,
    repeats: int,
    only: Collection[str] | None = None,
    window: int | None = None,
) -> list[Row]:
    """Check each layer at the size and in the way it is timed, then time all in turn: rows of checks, one of times."""
    layers, missing = candidates(shape, device, window=window, compiled=compiler is not None)
    x = torch.randn(shape.b, shape.n, shape.hidden, device=device).to(dtype)
    calls: dict[str, Callable[[], tuple[Tensor, ...]]] = {}
    rows: list[Row] = []
    wanted: dict[AttentionSpec, tuple[Tensor, ...]] = {}
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=ALLOWED_GRAPHS):
        for name, layer in layers.items():
            if only is not None and name not in only:
                continue
            layer.to(device, dtype)
            if layer.spec not in wanted:
                own = Attention(shape.hidden, shape.h, layer.spec, num_key_heads=shape.g).to(device, dtype)
                own.load_state_dict(layer.state_dict())
                wanted[layer.spec] = as_call(own, own, x, passes)()
            timed: Callable[[Tensor], Tensor] = layer
            if compiler is not None:
                timed = torch.compile(layer, backend=compiler, dynamic=False, fullgraph=True)
            call = as_call(layer, timed, x, passes)
            try:
                got = call()
            except RuntimeError as error:
                if name in MUST_RUN:
                    raise
                missing[name] = reason(error)
                continue
            what = ["output"] if passes == "forward" else ["d input", *(f"d {n}" for n, _ in layer.named_parameters())]
            parts = zip(what, got, wanted[layer.spec], strict=True)
            checked = worst([check(f"{name}, {part},", ours, own_eager) for part, ours, own_eager in parts])
            rows.append({"kind": "check as timed", "attention": name, "passes": passes, **shape._asdict(), **checked})
            calls[name] = call
        del wanted
        found = time_candidates(calls, repeats=repeats, device=device, required=MUST_RUN, ahead=True)
    row = {"kind": "layer" if window is None else "window layer", "compiler": compiler or "none", "dtype": str(dtype)}
    return [*rows, row | {"passes": passes, "window": window} | report(shape, found, missing)]


def as_call(
    layer: Attention, run: Callable[[Tensor], Tensor], x: Tensor, passes: str
) -> Callable[[], tuple[Tensor, ...]]:
    """Return a call for the layer's output, or for the gradients of its input and of every weight."""
    if passes == "forward":
        return torch.no_grad()(lambda: (run(x),))
    leaves = [x.detach().requires_grad_(), *layer.parameters()]
    weights = torch.ones_like(x)
    weights[:, ::2] = -1  # a constant gradient would cancel in the softmax
    return lambda: torch.autograd.grad(run(leaves[0]), leaves, weights)


def report(shape: Shape, found: Timed, missing: dict[str, str]) -> Row:
    """Return milliseconds with quantiles, and ratios of times of the same round.

    `time_over_best_rope`: against the full RoPE layer with the least median; `time_over_same_kernel`: against RoPE on
    the kernel of the same name; `time_over_best_peer`: windows against the best of other libraries' windows.
    """
    seconds = found.seconds
    ropes = [name for name in seconds if name.split(",")[0] == "rope" and ", window" not in name]
    first, peer = best(seconds, ropes), best(seconds, ["rope, window, flex", "rope, window, flash-attn"])
    assert first is not None
    others = [name for name in seconds if name not in ropes]
    twins = {name: ", ".join(["rope", *name.split(", ")[1:]]) for name in others if ", window" not in name}
    twins = {name: twin for name, twin in twins.items() if twin in seconds}
    windows = {name: peer for name in others if peer and name.endswith(", window")}

    def over(pairs: dict[str, str]) -> dict[str, dict[str, float]]:
        return {name: ratio(seconds[name], seconds[other]).spread for name, other in pairs.items()}

    return {
        **shape._asdict(),
        "d": shape.d,
        "milliseconds": {name: quantiles(x).milliseconds for name, x in seconds.items()},
        "best_rope": first,
        "time_over_best_rope": over(dict.fromkeys(others, first)),
        "time_over_same_kernel": over(twins),
        "best_peer": peer,
        "time_over_best_peer": over(windows),
        "peak_bytes": found.peaks,
        "missing": missing | found.missing,
    }


def tables(rows: list[Row]) -> list[Table | str]:
    """Tabulate ratios of times to the best RoPE's, to RoPE on the same kernel or the best other window, and memory."""
    found: list[Table | str] = []
    for row in (row for row in rows if "best_rope" in row):
        how = [f"window {row['window']}"] * bool(row["window"]) + ["not compiled"] * (row["compiler"] == "none")
        size = f"{row['b']} × {row['n']:,} tokens, {row['h']} heads of {row['d']} on {row['g']}"
        beside = "time_over_best_peer" if row["window"] else "time_over_same_kernel"
        columns: dict[str, Callable[[Row], str]] = {
            "attention": lambda x: x["name"] + " (best)" * (x["name"] == x["best_rope"]),
            "ms": lambda x: f"{x['milliseconds'][x['name']]['median']:.3f}",
            "time / best RoPE": lambda x: show(x["time_over_best_rope"].get(x["name"])),
            "time / " + beside[10:].replace("_", " "): lambda x: show(x["beside"].get(x["name"])),
            "peak MB": lambda x: f"{x['peak_bytes'][x['name']] / 1e6:,.1f}",
        }
        lines = [{**row, "name": name, "beside": row[beside]} for name in row["milliseconds"]]
        found += table(", ".join([row["passes"], size, *how]), lines, columns)
    return [*found, *missing_lines(rows), *worst_line(rows)]


def show(found: dict[str, float] | None, digits: int = 3) -> str:
    """Write a ratio with the quantiles around it.

    >>> show({"median": 1.0, "low": 0.9, "high": 1.25}, 2), show(None)
    ('1.00 (0.90–1.25)', '–')
    """
    if found is None:
        return "–"
    return f"{found['median']:.{digits}f} ({found['low']:.{digits}f}–{found['high']:.{digits}f})"


def missing_lines(rows: list[Row]) -> list[str]:
    """Name the candidates without figures, and why."""
    found = (x for row in rows if isinstance(row.get("missing"), dict) for x in row["missing"].items())
    return sorted({f"missing: {name}: {why}" for name, why in found})


def worst_line(rows: list[Row]) -> list[str]:
    """Name the check that came nearest to its limit."""
    checks = [row for row in rows if "error" in row]
    if not checks:
        return []
    row = max(checks, key=lambda row: row["error"] / row["allowed"])
    return [
        f"{len(checks)} checks passed; nearest to its limit: {row['attention']}, {row['error']:.1e} of the largest "
        f"number (allowed: {row['allowed']:.1e})"
    ]
