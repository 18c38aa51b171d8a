"""Softmax attention alone or as a layer with its projections: this library's kernels and others', compiled or not."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from farspan.bench import SEED, Row, Steps
from farspan.bench.checks import PASSES, SMALL, Blocks, Candidate, checked_queries, compare, definition, smaller
from farspan.bench.timing import best, ratio, spread
from farspan.errors import require
from farspan.layers import Attention, AttentionSpec
from farspan.ops import Rotary, alibi_slopes, coca_features
from farspan.ops.masking import make_mask
from farspan.ops.reference import repeat_heads

SHAPES = {512: (64, 1024, 16), 2048: (16, 1024, 16), 16_384: (2, 2048, 16), 32_768: (1, 4096, 32)}
"""Tokens → sequences, hidden width, heads: the shapes that the project's aims name."""
WINDOW_WIDTH, WINDOW_TOY, OP_TOY = (1024, 16), (128, 2), (256, 4)
"""Hidden width and heads beside a window: on a GPU, and elsewhere of a layer and of the op alone."""
QUICK = (
    *("rope", "coca-exact", "coca-slack", "coca-strict", "rope, flash", "rope, cudnn"),
    *("coca-exact, plain", "coca-slack, plain"),
)
FULL = (
    *("rope", "coca-exact", "coca-slack", "coca-strict"),
    *("rope, flash", "coca-exact, flash", "coca-slack, flash", "rope, cudnn", "coca-exact, cudnn", "coca-slack, cudnn"),
    *("coca-exact, plain", "coca-slack, plain", "coca-slack, published", "rope, flex", "alibi, flex"),
)
WINDOWS = (
    *("rope", "rope, window", "coca-exact, window", "pope, window"),
    *("rope, window, flex", "rope, window, flash-attn"),
)
OPS, PUBLISHED = ("rope", "coca-exact", "coca-slack", "alibi"), "coca-slack, published"
PEERS = ("rope, window, flex", "rope, window, flash-attn", PUBLISHED)
"""What is timed: an attention, then "window" if it has one, then whose kernel computes it if not the library's own.
RoPE and CoCA are timed on each of SDPA's kernels by name as well, so that no ratio hangs on which one SDPA picks."""
SCORES = 2**31
"""The most N×N scores for which the published formulation is run."""
PLANTED = 16
"""How much larger values on both sides of a window's edge are: one of them stands out among 2,048 others."""
GROUPS = (1, 2, 4, 8)
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


def shapes(
    lengths: Sequence[int], groups: Sequence[int], device: str, window: int | None = None, alone: bool = False
) -> list[Shape]:
    """Return the named shapes, and 32,768 tokens at a time of other lengths; on a CPU a toy of each length."""
    for group in groups:
        require(group in GROUPS, f"groups must be of {GROUPS}, query heads per key head, got {group}; choose from them")
    found = []
    for n in lengths:
        b, hidden, h = SHAPES.get(n, (max(1, 32_768 // n), 1024, 16)) if device == "cuda" else (2, 128, 8)
        if window is not None:
            b, toy = max(1, 32_768 // n) if device == "cuda" else 1, OP_TOY if alone else WINDOW_TOY
            hidden, h = WINDOW_WIDTH if device == "cuda" else toy
        found += [Shape(b, n, hidden, h, max(1, h // group)) for group in groups]
    return found


Core = Callable[[Attention, Tensor, Tensor, Tensor], Tensor]
"""layer, q (b, h, n, d), k or t (b, g, n, ·), and v (b, g, n, d) → (b, h, n, d)."""


class Peer(Attention):
    """An attention layer with the library's projections and another's attention."""

    def __init__(self, core: Core, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.core = core

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.o_proj(self.core(self, *self.project(x)).transpose(1, 2).flatten(2))


def own(layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Call this library's op, mask and angles included."""
    mask = make_mask(q.shape[2], k.shape[2], q.shape[0], q.device, window=layer.spec.window)
    return layer.attend(q, k, v, mask, layer.rotary)


def features(layer: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Bring q and k into dot-product form, as the library does."""
    return layer.features(q, k, make_mask(q.shape[2], k.shape[2], q.shape[0], q.device), layer.rotary)


def sdpa(layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    grouped = layer.num_heads != layer.num_key_heads
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scaling, enable_gqa=grouped)


def on_kernel(backend: SDPBackend, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Call SDPA's kernel of that name and no other, on rotated queries and keys."""
    with sdpa_kernel(backend):
        return sdpa(layer, *features(layer, q, k), v)


def plain(layer: Attention, q: Tensor, t: Tensor, v: Tensor) -> Tensor:
    """Compute CoCA's features by plain torch from tables of angles, for torch.compile to fuse."""
    assert layer.rotary is not None
    angles = make_mask(q.shape[2], t.shape[2], q.shape[0], q.device).angles(layer.rotary)
    return sdpa(layer, *coca_features(q, t, angles.query(q.dtype), angles.key(q.dtype), form=layer.form), v)


def make_flex(shape: Shape, spec: AttentionSpec, device: str) -> Core:
    """Make FlexAttention with a block mask, made once; ALiBi is its score modification."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key if spec.window is None else (query >= key) & (query - key < spec.window)

    make = torch.compile(create_block_mask) if device == "cuda" else create_block_mask  # else N×N numbers are made
    mask = make(seen, None, None, shape.n, shape.n, device=device)
    slopes = alibi_slopes(shape.h, device=device)

    def lowered(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score - slopes[h] * (query - key)

    def flex(layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = features(layer, q, k)
        grouped, change = layer.num_heads != layer.num_key_heads, lowered if spec.kind == "alibi" else None
        out = flex_attention(q, k, v, score_mod=change, block_mask=mask, scale=layer.scaling, enable_gqa=grouped)
        assert isinstance(out, Tensor)
        return out

    return flex


def flash_attn(layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Call the window of the package flash-attn."""
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


KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
CORES: dict[str, Core] = {name: partial(on_kernel, kernel) for name, kernel in KERNELS.items()}
CORES |= {"plain": plain, "published": published, "flash-attn": flash_attn}


# What is timed


def why_not(name: str, shape: Shape, device: str, compiled: bool) -> str | None:
    """Return why a candidate is left out, or None."""
    scores = shape.b * shape.h * shape.n**2
    reasons = {
        "published": (scores > SCORES, f"{scores:.1e} scores at once, more than {SCORES:.1e}"),
        "plain": (device != "cuda", "what the library itself does without CUDA"),
        "flex": (not compiled, "FlexAttention is made to be compiled"),
        "flash-attn": (device != "cuda" or not find_spec("flash_attn"), "needs CUDA, and pip install flash-attn"),
    }
    applies, why = reasons.get(name.split(", ")[-1], (False, ""))
    return why if applies else None


def plant(v: Tensor, window: int | None) -> None:
    """Enlarge values (b, n, …) at the first key in the window of each checked query, and at the last key before it.

    An error by one key shows then. Larger keys would show it too, but turn rounding into large errors.
    """
    if window is not None:
        first = {(rows.start, i.start - window) for rows, i in checked_queries(v.shape[0], v.shape[1], window)}
        for row, i in {(row, i + more) for row, i in first for more in (0, 1) if i >= 0}:
            v[row, i] *= PLANTED


def make_candidate(
    name: str, shape: Shape, x: Tensor, *, alone: bool, window: int | None, compiler: str | None
) -> Candidate:
    """Make the candidate of a name: the op `alone`, on ready q, k and v, or a layer of x with its projections."""
    kind, *rest = name.split(", ")
    spec = AttentionSpec.parse(AttentionSpec.parse(kind).to_dict() | {"window": window if "window" in rest else None})
    core: Core = own
    if rest and rest[-1] != "window":
        core = make_flex(shape, spec, x.device.type) if rest[-1] == "flex" else CORES[rest[-1]]
    make: Callable[..., Attention] = Attention if core is own else partial(Peer, core)
    options: dict[str, Any] = {"spec": spec, "num_key_heads": shape.g}
    layer = make(shape.hidden, shape.h, **options).to(x.device, x.dtype)
    compiled = partial(torch.compile, backend=compiler, dynamic=False) if compiler else lambda run, **_: run

    def twin(dtype: torch.dtype, blocks: Blocks) -> tuple[Tensor, list[Tensor]]:
        one = Attention(shape.hidden, shape.h, **options).to(x.device, dtype)
        one.load_state_dict(layer.state_dict())
        inputs = [part.detach().to(dtype).requires_grad_() for part in leaves.values()]
        if alone:
            return definition(one, blocks, *inputs), inputs
        out = definition(one, blocks, *one.project(inputs[0])).flatten(1)
        return one.o_proj(out), [inputs[0], *one.parameters()]

    if alone:
        leaves = {c: part.detach() for c, part in zip("qkv", layer.project(x), strict=True)}
        plant(leaves["v"].transpose(1, 2), window)
        for leaf in leaves.values():
            leaf.requires_grad_()
        attend = compiled(core)
        run: Callable[[], Tensor] = lambda: attend(layer, *leaves.values()).transpose(1, 2)  # noqa: E731
    else:
        leaves = {"input": x.detach().requires_grad_(), **dict(layer.named_parameters())}
        run = partial(compiled(layer, fullgraph=True), leaves["input"])
    return Candidate(run, leaves, twin, ours=core in (own, plain))


def steps(
    todo: Sequence[Shape],
    *,
    only: Sequence[str] | None = None,
    window: int | None = None,
    eager: bool = False,
    device: str,
    **options: Any,
) -> Steps:
    """Check and time candidates at each shape in both passes.

    bfloat16 and Inductor on a GPU. Elsewhere float32, where torch.compile only traces, and windows are not compiled.

    Args:
        only: whom to time, by name.
        window: time window layers of this width beside full RoPE.
        eager: compile nothing.
        options: the others of :func:`time_shape`.
    """
    compiler = "inductor" if device == "cuda" else "aot_eager" if window is None else None
    options |= {"window": window, "device": device, "compiler": None if eager else compiler}
    names = only or (FULL if window is None else WINDOWS)
    timed = ((x, passes) for x in todo for passes in PASSES)
    return [(f"{passes}, {x.b} × {x.n:,}", partial(time_shape, names, x, passes, **options)) for x, passes in timed]


def op_steps(lengths: Sequence[int], published_length: int, **options: Any) -> Steps:
    """Time the op at each length, 8 heads of width 64, forward; at `published_length` also CoCA as published."""
    found: Steps = []
    for n in sorted({*lengths, published_length}):
        names = (*OPS, PUBLISHED) if n == published_length else OPS
        work = partial(time_shape, names, Shape(1, n, 512, 8, 8), PASSES[0], alone=True, **options)
        found.append((f"forward, {n:,} tokens", work))
    return found


def time_shape(
    names: Sequence[str],
    shape: Shape,
    passes: str,
    *,
    alone: bool = False,
    window: int | None = None,
    compiler: str | None = None,
    repeats: int,
    device: str,
    dtype: torch.dtype | None = None,
) -> list[Row]:
    """Check and time candidates at one shape: rows of checks, one of times.

    `time_over_best_rope`: against the full RoPE with the least median; `time_over_best_peer`: this library's own
    against the best of other libraries' windows, or CoCA as published. Both are ratios of times of the same round.

    Args:
        alone: time the op without projections.
    """
    torch.manual_seed(SEED)
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    reasons = {name: why_not(name, shape, device, compiler is not None) for name in names}
    missing = {name: why for name, why in reasons.items() if why is not None}
    x = torch.randn(shape.b, shape.n, shape.hidden, device=device).to(dtype)
    how: dict[str, Any] = {"alone": alone, "window": window, "compiler": compiler}
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=ALLOWED_GRAPHS):
        made = {name: make_candidate(name, shape, x, **how) for name in names if name not in missing}
        like = x.view(shape.b, shape.n, shape.h, shape.d) if alone else x
        how["window"] = window and min(window, SMALL // 3)
        small = []
        for sizes in smaller(shape.b, shape.n):
            few, y = shape._replace(**sizes), x[: sizes["b"], : sizes["n"]].contiguous()
            small.append({name: make_candidate(name, few, y, **how) for name in made})
        options: dict[str, Any] = {"repeats": repeats, "device": device, "small": small, "window": window}
        checks, seconds, peaks = compare(made, like, passes, missing=missing, **options)
    ropes = [name for name in seconds if name.split(", ")[0] == "rope" and "window" not in name]
    first, peer = best(seconds, ropes), best(seconds, PEERS)
    assert first is not None
    others = [name for name in seconds if name not in ropes]
    row: Row = {"kind": "op" if alone else "layer" if window is None else "window layer", "passes": passes}
    row |= {"compiler": compiler or "none", "dtype": str(dtype), "window": window, **shape._asdict(), "d": shape.d}
    row |= {"milliseconds": {name: spread(x, 1e3) for name, x in seconds.items()}, "best_rope": first}
    row |= {"time_over_best_rope": {name: ratio(seconds[name], seconds[first]) for name in others}, "best_peer": peer}
    row["time_over_best_peer"] = {x: ratio(seconds[x], seconds[peer]) for x in others if peer and x not in PEERS}
    return [*checks, row | {"peak_bytes": peaks, "missing": missing}]
