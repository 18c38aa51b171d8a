"""The Triton kernels against RoPE on SDPA's kernels, in one run on one device: first right, then fast."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from farspan.benchmark.agree import ResultsDifferError, reason
from farspan.benchmark.clock import Times, captured, clock_in_turn, comparable, copy_speed, quantiles
from farspan.benchmark.kernel_checks import check_at_size, check_kernels, compare_forms
from farspan.benchmark.truth import LOOSE, far
from farspan.ops import Rotary, coca_attention, coca_features
from farspan.ops.device import assembler
from farspan.ops.masking import make_mask

PEERS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
LARGEST = 24e9
"""Bytes of a peer's cache beyond which a shape is left out."""


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
LAYERS = [Shape(64, 16, 16, 512, 512, 64), Shape(16, 16, 16, 2048, 2048, 64), Shape(2, 16, 16, 16_384, 16_384, 128),
          Shape(1, 32, 32, 32_768, 32_768, 128), Shape(4, 32, 8, 8192, 8192, 128)]  # fmt: skip
TOY = [Shape(2, 2, 1, 1, 70, 16)]


def decoding_shapes() -> list[Shape]:
    """Every length, width, group size and batch that the record asks for, but those too large to hold."""
    grid = [
        Shape(b, 32, 32 // group, 1, m, d)
        for d in (64, 128)
        for group in (1, 4, 8)
        for b in (1, 8, 32)
        for m in (512, 2048, 8192, 32_768, 131_072)
    ]
    return [shape for shape in dict.fromkeys(NOTED + grid) if shape.key_bytes[1] <= LARGEST]


def run(
    *, quick: bool, device: str, seed: int, repeats: int, toy: bool = False
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield (what was done, its rows); raises ResultsDifferError before any clock starts if a kernel is wrong."""
    torch.manual_seed(seed)
    yield "assembler", [assembler_row()]
    yield "kernels against float64", check_kernels(device, toy=toy)
    size = 2**20 if toy else 2**31
    yield "copy", [{"kind": "copy", "terabytes_a_second": copy_speed(device, size)}]
    grid = NOTED if quick else decoding_shapes()
    decoding, layers = (TOY, TOY) if toy else (grid, LAYERS)
    work: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    work += [(f"decode {tuple(shape)}", partial(decode, shape, device, repeats)) for shape in decoding]
    for shape in layers:
        for form in ("exact", "slack"):
            work.append((f"prepare {form} {tuple(shape)}", partial(prepare, shape, form, device, repeats)))
    for name, make in work:
        yield name, [beside_copies(make, device, size)]


def beside_copies(make: Callable[[], dict[str, Any]], device: str, size: int) -> dict[str, Any]:
    """A row, with the speed of a copy right before and after it, and which ptxas made the kernels.

    `of_copy` is the share of the better of the two: a GPU's memory has been seen 11% slower in one run than in another,
    and a ceiling that is too low would flatter whatever is held against it.
    """
    before = copy_speed(device, size)
    row = make()
    copies = {"before": before, "after": copy_speed(device, size)}
    for part in (row, row.get("backward", {})):
        if "terabytes_a_second" in part:
            part["of_copy"] = {
                name: rate / max(copies.values()) for name, rate in part["terabytes_a_second"].items() if name in OURS
            }
    return row | {"copy_terabytes_a_second": copies, "ptxas": assembler_row()["ptxas"]}


def assembler_row() -> dict[str, Any]:
    """Which ptxas made the kernels: cuts are chosen by it, and one release has been seen to make wrong ones."""
    return {"kind": "assembler", "ptxas": ".".join(map(str, assembler()))}


def random_inputs(shape: Shape, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, t, k, v in bfloat16."""
    b, h, g, n, m, d = shape
    sizes = ((b, h, n, d), (b, g, m, d // 2), (b, g, m, d), (b, g, m, d))
    q, t, k, v = (torch.empty(size, dtype=torch.bfloat16, device=device).normal_() for size in sizes)
    return q, t.relu_(), k, v


@torch.no_grad()
def decode(shape: Shape, device: str, repeats: int) -> dict[str, Any]:
    """One token a sequence. RoPE's keys are cached rotated, and its query's rotation is not charged to it."""
    q, t, k, v = random_inputs(shape, device)
    b, h, g, n, _, d = shape
    calls: dict[str, Callable[[], Tensor]] = {
        form: partial(coca_attention, q, t, v, rotary=Rotary(d), form=form, backend="triton")
        for form in ("exact", "slack")
    }
    calls |= rope_peers(q, k, v)
    if h > g:  # all heads of a group see the same keys: as queries of one head, they read them once
        folded = q.reshape(b, g, h // g * n, d)
        calls |= {f"{name}, heads as queries": call for name, call in rope_peers(folded, k, v).items()}
    outs = {form: calls[form]() for form in ("exact", "slack")}
    checked = check_at_size(f"decode {tuple(shape)}", compare_forms((q, t, v), outs, Rotary(d)))
    half, full = shape.key_bytes
    before = copy_speed(device, half // 2)  # of as many bytes: what a launch, and memory coming to speed, cost there
    times = times_of(calls, device, repeats)
    as_many = max(before, copy_speed(device, half // 2))
    moved = {name: half if name in outs else full for name in times}
    row = report("decode", shape, times, moved) | checked
    row["of_copy_alike"] = {name: row["terabytes_a_second"][name] / as_many for name in outs}
    return row | {"copy_alike_terabytes_a_second": as_many}


def prepare(shape: Shape, form: str, device: str, repeats: int) -> dict[str, Any]:
    """(q, t) → (q̃, k̃), forward and backward, fused against torch, and RoPE's rotation of q and k (forward alone).

    torch's are timed as written (eager) and compiled: by Inductor on a GPU; elsewhere only traced, as a toy.
    """
    from farspan.ops.triton.coca_features import prepare_op

    q, t, k, _ = random_inputs(shape, device)
    rotary = Rotary(shape.d)
    angles = make_mask(shape.n, shape.m, shape.b, q.device).angles(rotary)
    step, query, key = angles.steps, angles.query(q.dtype), angles.key(q.dtype)
    both: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
        "fused": lambda q, t: prepare_op(q, t, step, None, None, shape.m - shape.n, 0, form, 1.0),
        "torch": lambda q, t: coca_features(q, t, query, key, form=form),
        "rope, torch": lambda q, _: (angles.rotate_queries(q), angles.rotate_keys(k)),
    }
    torch.compiler.reset()  # after eight shapes of one function, torch.compile would quietly leave it as it is
    compiler = "inductor" if device.startswith("cuda") else "aot_eager"
    for name in ("torch", "rope, torch"):
        both[f"{name}, compiled"] = torch.compile(both[name], backend=compiler, dynamic=False)
    times = times_of({name: partial(call, q, t) for name, call in both.items()}, device, repeats)
    moved = 2 * (2 * q.numel() + 3 * t.numel())
    row = report("prepare", shape, times, {"fused": moved}) | {"form": form}
    row |= alike(f"prepare {form} {tuple(shape)}", both["fused"](q, t), both["torch"](q.float(), t.float()))
    leaves = [q.requires_grad_(), t.requires_grad_()]
    gradients: dict[str, Callable[[], Any]] = {}
    for name in ("fused", "torch", "torch, compiled"):
        if isinstance(times[name], Times):
            out = both[name](q, t)
            weights = [torch.ones_like(x) for x in out]
            gradients[name] = partial(torch.autograd.grad, out, leaves, weights, retain_graph=True)
    backward = times_of(gradients, device, repeats, capture=False)
    moved = 2 * (3 * q.numel() + 3 * t.numel())
    checked = {}
    if "torch" in gradients:
        checked = alike(f"prepare {form} {tuple(shape)}, backward", gradients["fused"](), gradients["torch"]())
    return row | {"backward": report("prepare", shape, backward, {"fused": moved}) | checked}


def alike(what: str, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> dict[str, float]:
    """Fields of a row: how far the fused preparation is from torch's, as a part of the largest number of each result.

    Raises:
        ResultsDifferError: farther than :data:`LOOSE`.
    """
    errors, allowed = [far(x, y) for x, y in zip(got, want, strict=True)], LOOSE[got[0].dtype]
    for error in errors:
        if not error <= allowed:
            raise ResultsDifferError(f"fused as timed is wrong on {what}: {error:.1e} (allowed: {allowed:.1e})")
    return {"error_as_timed": max(errors), "allowed_as_timed": allowed}


def rope_peers(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Tensor]]:
    """SDPA's kernels on ready keys; on a CPU the one it has."""

    def call(backend: SDPBackend | None) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)

    if not q.is_cuda:
        return {"sdpa": lambda: call(None)}
    return {name: lambda backend=backend: call(backend) for name, backend in PEERS.items()}  # type: ignore[misc]


def times_of(
    calls: dict[str, Callable[[], Any]], device: str, repeats: int, *, capture: bool = True
) -> dict[str, Times | str]:
    """The times of each call, taken in turn, and for a peer that fails (by its shape, or memory), why.

    From CUDA graphs if `capture`, where the peer can be captured; `graph` says which time it is. The graphs hold their
    memory all at once, so that every call is tried once more when all of them are there.
    """
    ready: dict[str, Callable[[], Any]] = {}
    failed: dict[str, str] = {}
    graphs = set[str]()
    for name, call in calls.items():
        if _runs(name, call, failed):
            ready[name] = call
            if capture and device.startswith("cuda"):
                with nullcontext() if name in OURS else suppress(RuntimeError):
                    ready[name] = captured(call)
                    graphs.add(name)
    ready = {name: call for name, call in ready.items() if _runs(name, call, failed)}
    seconds = clock_in_turn(ready, device=device, repeats=repeats, start=not capture)
    return {name: failed.get(name) or quantiles(seconds[name], name in graphs) for name in calls}


def _runs(name: str, call: Callable[[], Any], failed: dict[str, str]) -> bool:
    """Whether a contestant can run; why a peer cannot is put down, and ours may not fail."""
    try:
        call()
    except RuntimeError as error:
        if name in OURS:
            raise
        failed[name] = reason(error)
    return name not in failed


OURS = ("exact", "slack", "fused")


def report(
    kind: str,
    shape: Shape,
    times: dict[str, Times | str],
    moved: dict[str, int] | None = None,
) -> dict[str, Any]:
    """One row: milliseconds with quantiles, terabytes a second, and how much faster ours is than the best peer.

    `missing` names the peers without a time, or without one taken as ours was, and why: the best peer is the best of
    the others.
    """
    known = {name: t for name, t in times.items() if isinstance(t, Times)}
    graph = any(t.graph for name, t in known.items() if name in OURS)
    peers, unfair = comparable({name: t for name, t in known.items() if name not in OURS}, graph)
    best = min(peers, key=lambda name: peers[name].median, default=None)
    row: dict[str, Any] = {"kind": kind, **shape._asdict(), "best_peer": best}
    row["milliseconds"] = {name: known[name].milliseconds if name in known else None for name in times}
    row["missing"] = {name: why for name, why in times.items() if isinstance(why, str)} | unfair
    row["speedup"] = {name: known[best].median / known[name].median for name in OURS if name in known and best}
    if moved is not None:
        row["terabytes_a_second"] = {name: moved[name] / t.median / 1e12 for name, t in known.items() if name in moved}
    return row
