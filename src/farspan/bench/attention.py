"""Attention alone on long sequences: the op, also with a window, and on a GPU the half-width kernel of decoding."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from farspan.bench import Row, Steps, layer
from farspan.bench.checks import PASSES, check, worst
from farspan.bench.timing import best, copy_speed, spread, time_candidates
from farspan.ops import Rotary, coca_attention, coca_attention_reference
from farspan.ops.device import assembler

OPS = ("rope", "coca-exact", "coca-slack", "alibi")
PUBLISHED = "coca-slack, published"


def steps(lengths: Sequence[int], published_length: int, **options: Any) -> Steps:
    """Time the op at each length, 8 heads of width 64, in float32; at `published_length` also CoCA as published."""
    found: Steps = []
    for n in sorted({*lengths, published_length}):
        names = (*OPS, PUBLISHED) if n == published_length else OPS
        work = partial(layer.time_shape, names, layer.Shape(1, n, 512, 8, 8), PASSES[0], alone=True, **options)
        found.append((f"forward, {n:,} tokens", work))
    return found


def window_steps(lengths: Sequence[int], window: int, *, device: str, **options: Any) -> Steps:
    """Time windows of `window` keys against full RoPE at each length, forward and with gradients."""
    hidden, h, tokens = (*layer.WINDOW_WIDTH, 32_768) if device == "cuda" else (256, 4, 1)
    todo = [layer.Shape(max(1, tokens // n), n, hidden, h, h) for n in lengths]
    return layer.steps(todo, window=window, alone=True, device=device, **options)


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
    rope = partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=h > g)
    kernels = layer.KERNELS.items() if q.is_cuda else ()
    calls |= {name: sdpa_kernel(kernel)(rope) for name, kernel in kernels} or {"sdpa": rope}
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
    first = best(timed.seconds, timed.seconds.keys() - set(FORMS))
    half, full = shape.key_bytes
    times = {name: spread(seconds, 1e3) for name, seconds in timed.seconds.items()}
    rate = {name: (half if name in FORMS else full) / x["median"] / 1e9 for name, x in times.items()}
    row: Row = {"kind": "decode", **shape._asdict(), "best_peer": first, "milliseconds": times}
    row["speedup"] = {form: times[first]["median"] / times[form]["median"] for form in FORMS if first}
    row |= {"terabytes_a_second": rate, "of_copy": {form: rate[form] / max(copies) for form in FORMS}}
    row |= {"copy_terabytes_a_second": dict(zip(("before", "after"), copies, strict=True)), "missing": timed.missing}
    return [row | {"ptxas": ".".join(map(str, assembler())), **worst(checks)}]
