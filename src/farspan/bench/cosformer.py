"""Causal cosFormer beside softmax attention and as it was published; on a GPU its kernels and their peers."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from farspan.bench import SEED, Row, Steps
from farspan.bench.checks import PASSES, Blocks, Candidate, by_blocks, by_heads, compare, smaller
from farspan.bench.timing import ratio, spread
from farspan.ops import cosformer_attention

LENGTHS = [1024, 2048, 4096, 8192, 16_384, 32_768, 65_536]
QUICK = [2048, 16_384]
TOKENS = 65_536
"""Tokens of a row of the GPU's table: shorter sequences come in larger batches."""
WIDTHS = (64, 128)
KERNELS = ("triton", "chunked", "flash softmax", "fla")
"""What is timed on a GPU; on a CPU "cosformer", "softmax" and "published". The others are compared with the first."""
PEERS = ("softmax", "published", "flash softmax", "fla")
SOFTMAX = 4096
"""Tokens beyond which softmax attention takes minutes on a CPU, and is left out."""
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k and v (b, n, h, d), as projections leave them → (b, n, h, d)."""


class Shape(NamedTuple):
    """b sequences of n tokens, h heads of width d."""

    b: int
    h: int
    n: int
    d: int


def shapes(lengths: Sequence[int]) -> list[Shape]:
    """Return as many tokens of each width at each length."""
    return [Shape(max(1, TOKENS // n), 16, n, d) for d in WIDTHS for n in lengths]


def steps(lengths: Sequence[int], published_length: int, **options: Any) -> Steps:
    """Time cosFormer at each length, beside softmax attention where that is short, and as published; on a CPU."""
    found: Steps = []
    for n in sorted({*lengths, published_length}):
        names = ["cosformer"] + ["softmax"] * (n <= SOFTMAX) + ["published"] * (n == published_length)
        found.append((f"{n:,} tokens", partial(time_shape, names, Shape(1, 8, n, 64), PASSES[0], **options)))
    names, shape = ["cosformer", "published"], Shape(1, 8, published_length, 64)
    work = partial(time_shape, names, shape, PASSES[1], **options)
    return [*found, (f"{published_length:,} tokens, {PASSES[1]}", work)]


def kernel_steps(todo: Sequence[Shape], **options: Any) -> Steps:
    """Check and time the kernels at each shape in both passes.

    Peers are flash-linear-attention with the same features, where it is installed, and flash attention.
    """
    return [
        (f"{passes}, width {x.d}, {x.b} × {x.n:,} tokens", partial(time_shape, KERNELS, x, passes, **options))
        for x in todo
        for passes in PASSES
    ]


def time_shape(names: Sequence[str], shape: Shape, passes: str, *, repeats: int, device: str) -> list[Row]:
    """Make rows of checks and one row: milliseconds, time over the first, memory over the least, the state's bytes.

    The least that a training step can hold is q, k, v, the output, and the gradient of each. The state is what decoding
    keeps per sequence.
    """
    torch.manual_seed(SEED)
    ops, missing = make_ops(names, shape, device)
    dtype = torch.bfloat16 if names[0] == "triton" else torch.float32
    make = partial(make_candidates, ops, dtype=dtype, device=device, max_length=shape.n)
    made, small = make(shape), [make(shape._replace(**few)) for few in smaller(shape.b, shape.n)]
    backward, size, like = passes != PASSES[0], dtype.itemsize * math.prod(shape), made[names[0]].leaves["v"]
    how: dict[str, Any] = {"missing": missing, "repeats": repeats, "device": device, "small": small}
    checks, seconds, peaks = compare(made, like, passes, graph=not backward, **how)
    held, least = size * (4 if backward else 3), size * (8 if backward else 4)
    row: Row = {"kind": "linear", "passes": passes, **shape._asdict(), "state_bytes": state_bytes(shape, dtype, device)}
    row["milliseconds"] = {name: spread(x, 1e3) for name, x in seconds.items()}
    row["speedup"] = {name: ratio(x, seconds[names[0]]) for name, x in seconds.items() if name != names[0]}
    row["memory_over_least"] = {name: (held + peak) / least for name, peak in peaks.items()}
    return [*checks, row | {"peak_bytes": peaks, "missing": missing}]


def make_ops(names: Sequence[str], shape: Shape, device: str) -> tuple[dict[str, Attention], dict[str, str]]:
    """Return functions of q, k and v (b, n, h, d) by name, and why others are missing."""
    cosformer = partial(cosformer_attention, max_length=shape.n)
    softmax: Attention = partial(F.scaled_dot_product_attention, is_causal=True)
    flash: Attention = softmax if device == "cpu" else sdpa_kernel(SDPBackend.FLASH_ATTENTION)(softmax)
    made: dict[str, Attention] = {"cosformer": cosformer, "softmax": softmax, "flash softmax": flash}
    made["published"] = partial(published_cosformer, max_length=shape.n)
    made |= {name: partial(cosformer, backend=name) for name in ("triton", "chunked")}
    ops = {name: by_heads(made[name]) for name in names if name in made}
    if "fla" not in names:
        return ops, {}
    peer, missing = flash_linear_attention(device)
    if peer is not None:
        waves = angles(shape.n, torch.empty(0, dtype=torch.bfloat16, device=device))

        def fla(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen = [wave[: q.shape[1]] for wave in waves]
            return peer(features(q, seen), features(k, seen), v)

        ops["fla"] = fla
    return ops, missing


def make_candidates(
    ops: dict[str, Attention], shape: Shape, *, dtype: torch.dtype, device: str, max_length: int
) -> dict[str, Candidate]:
    """Make candidates on the same random inputs. Those named "softmax" are another function, which is not checked."""
    leaves = {name: torch.randn(shape.b, shape.n, shape.h, shape.d, device=device).to(dtype) for name in "qkv"}
    for name in "qk":
        leaves[name] += 0.5  # rows that hardly meet a key have no digits to compare
    for leaf in leaves.values():
        leaf.requires_grad_()

    def twin(dtype: torch.dtype, blocks: Blocks) -> tuple[Tensor, list[Tensor]]:
        inputs = [x.detach().to(dtype).requires_grad_() for x in leaves.values()]
        attend = by_heads(partial(cosformer_attention, max_length=max_length, backend="reference"))
        if dtype != torch.float64:
            attend = partial(plain_attention, waves=angles(max_length, inputs[0]))
        return by_blocks(attend, blocks, *inputs), inputs

    made = {}
    for name, op in ops.items():
        run, known = partial(op, *leaves.values()), None if "softmax" in name else twin
        made[name] = Candidate(run, leaves, known, ours=name not in PEERS)
    return made


def angles(n: int, like: Tensor) -> Sequence[Tensor]:
    """Return cos and sin of positions, (n, 1, 1)."""
    phase = (math.pi / 2 / n * torch.arange(n, dtype=torch.float64, device=like.device))[:, None, None]
    return phase.cos().to(like.dtype), phase.sin().to(like.dtype)


def features(x: Tensor, waves: Sequence[Tensor]) -> Tensor:
    """Compute [ReLU(x) cos, ReLU(x) sin]: (b, n, h, d) → (b, n, h, 2d), at the last n positions of the waves."""
    return torch.cat([x.relu() * wave[-x.shape[1] :] for wave in waves], dim=-1)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, *, waves: Sequence[Tensor]) -> Tensor:
    """Compute what anyone would write of the last queries, all in the inputs' dtype."""
    seen = [wave[: k.shape[1]] for wave in waves]
    weights = features(q, seen).transpose(1, 2) @ features(k, seen).transpose(1, 2).mT
    weights = weights.tril(k.shape[1] - q.shape[1])
    total = weights.sum(-1, keepdim=True).clamp(min=1e-3)
    return (weights @ v.transpose(1, 2) / total).transpose(1, 2)


def published_cosformer(q: Tensor, k: Tensor, v: Tensor, max_length: int) -> Tensor:
    """Compute causal cosFormer as its authors' code does: k⊗v for each position, N×2d×d, and its running sum."""
    index = torch.arange(1, q.shape[2] + 1, device=q.device, dtype=q.dtype)
    angle = (math.pi / 2 * index / max_length)[:, None]
    q_, k_ = (torch.cat((x.relu() * angle.sin(), x.relu() * angle.cos()), dim=-1) for x in (q, k))
    sums = torch.cumsum(torch.einsum("bhld,bhlm->bhldm", k_, v), dim=2)
    numerator = torch.einsum("bhld,bhldm->bhlm", q_, sums)
    denominator = torch.einsum("bhld,bhld->bhl", q_, torch.cumsum(k_, dim=2))
    return numerator * (1 / denominator.clamp(min=1e-6))[..., None]


def state_bytes(shape: Shape, dtype: torch.dtype, device: str) -> int:
    """Return the bytes that one sequence leaves for the next token."""
    x = torch.ones(1, shape.h, shape.n, shape.d, dtype=dtype, device=device)
    found: int = cosformer_attention(x, x, x, max_length=shape.n, return_state=True)[1].nbytes
    return found


def flash_linear_attention(device: str) -> tuple[Attention | None, dict[str, str]]:
    """Return its chunk_linear_attn as a function of features q, k and of v, all (b, n, h, ·), or why there is none.

    It tries some fifty variants of each kernel at the first call, which takes minutes.
    """
    if not device.startswith("cuda"):
        return None, {"fla": "it needs a CUDA device"}
    if find_spec("fla") is None:
        return None, {"fla": "not installed; pip install fla-core"}
    chunk_linear_attn = import_module("fla.ops.linear_attn").chunk_linear_attn
    return lambda q, k, v: chunk_linear_attn(q, k, v, scale=1.0, normalize=True)[0], {}
