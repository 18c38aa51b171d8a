"""One attention layer with its projections, compiled or not: CoCA against RoPE on every kernel, in turn, in one run."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from farspan.benchmark.agree import reason
from farspan.benchmark.clock import Times, clock_in_turn, quantiles
from farspan.benchmark.layer_checks import check, check_as_timed
from farspan.benchmark.layer_peers import Shape, contestants, family_of
from farspan.benchmark.measure import measure
from farspan.errors import require
from farspan.layers import Attention
from farspan.training.speed import matmul_peak

SHAPES = {512: (64, 1024, 16), 2048: (16, 1024, 16), 16_384: (2, 2048, 16), 32_768: (1, 4096, 32)}
"""Tokens → texts, hidden width, heads: the shapes that the project's aims name."""
QUICK = {
    "rope",
    "coca-exact",
    "coca-slack",
    "coca-strict",
    "rope, flash",
    "rope, cudnn",
    "coca-exact, plain",
    "coca-slack, plain",
}
MUST_RUN = ("rope", "coca-exact", "coca-slack", "coca-strict")
"""If one of these fails there is no row; of the others the reason is told."""
GROUPS = (1, 2, 4, 8)
PASSES = ("forward", "forward and backward")
ALLOWED_GRAPHS = 128
"""torch.compile gives up after eight versions of one function; here each contestant is one, with and without grad."""


def shapes(lengths: Sequence[int], groups: Sequence[int], device: str) -> list[Shape]:
    """The named shapes, in other lengths 32 768 tokens at a time; on a CPU a toy of each length."""
    for group in groups:
        require(group in GROUPS, f"groups must be of {GROUPS}, query heads a key head, got {group}; choose among them")
    found = []
    for n in lengths:
        b, hidden, h = SHAPES.get(n, (max(1, 32_768 // n), 1024, 16)) if device == "cuda" else (2, 128, 8)
        found += [Shape(b, n, hidden, h, h // group) for group in groups]
    return found


def run(
    todo: Sequence[Shape],
    *,
    repeats: int = 20,
    only: Collection[str] | None = None,
    device: str = "cpu",
    seed: int = 0,
    dtype: torch.dtype | None = None,
    eager: bool = False,
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield (what was done, its rows); raises ResultsDifferError before a clock starts if a layer is wrong.

    bfloat16 and Inductor on a GPU; elsewhere float32, and torch.compile only traces. `eager`: nothing is compiled.
    `only`: whom to time, by name; all are checked in any case.
    """
    torch.manual_seed(seed)
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    peak = matmul_peak(torch.device(device), dtype)
    yield "matrix products", [{"kind": "matmul", "teraflops_a_second": peak / 1e12}]
    for small in _small(todo):
        yield f"layers of width {small.d} against float64", check(small, device, dtype)
    compiler = None if eager else "inductor" if device == "cuda" else "aot_eager"
    for shape in todo:
        for passes in PASSES:
            rows = compare(shape, passes, compiler, device=device, dtype=dtype, repeats=repeats, only=only, peak=peak)
            yield f"{passes}, {tuple(shape)}", rows


def parts(todo: Sequence[Shape]) -> int:
    """How many steps :func:`run` yields.

    >>> parts([Shape(1, 512, 1024, 16, 16), Shape(1, 2048, 1024, 16, 16)])  # of one width and group
    6
    """
    return 1 + len(_small(todo)) + len(todo) * len(PASSES)


def _small(todo: Sequence[Shape]) -> list[Shape]:
    """A shape for the equations in float64, of each width and group."""
    return list(dict.fromkeys(Shape(2, 200, 8 * x.d, 8, 8 * x.g // x.h) for x in todo))


def compare(
    shape: Shape,
    passes: str,
    compiler: str | None,
    *,
    device: str,
    dtype: torch.dtype,
    repeats: int,
    only: Collection[str] | None,
    peak: float,
) -> list[dict[str, Any]]:
    """The checks of each layer as it is timed at this shape, and one row with the figures of all."""
    layers, missing = contestants(shape, device)
    x = torch.randn(shape.b, shape.n, shape.hidden, device=device).to(dtype)
    calls: dict[str, Callable[[], tuple[Tensor, ...]]] = {}
    memory: dict[str, int] = {}
    rows, wanted = [], {}
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=ALLOWED_GRAPHS):
        for name, layer in layers.items():
            if only is not None and name not in only:
                continue
            if compiler is None and name.endswith(", flex"):
                missing[name] = "FlexAttention is made to be compiled"
                continue
            layer.to(device, dtype)
            family = family_of(name)
            if family not in wanted:
                own = Attention(shape.hidden, shape.h, family, num_key_heads=shape.g).to(device, dtype)
                own.load_state_dict(layer.state_dict())
                wanted[family] = as_call(own, own, x, passes)()
            timed: Callable[[Tensor], Tensor] = layer
            if compiler is not None:
                timed = torch.compile(layer, backend=compiler, dynamic=False, fullgraph=True)
            call = as_call(layer, timed, x, passes)
            try:
                got = call()
                memory[name] = measure(call, repeats=0, device=device).peak_bytes
            except RuntimeError as error:
                if name in MUST_RUN:
                    raise
                missing[name] = reason(error)
                continue
            what = ["output"] if passes == "forward" else ["d input", *(f"d {n}" for n, _ in layer.named_parameters())]
            checked = check_as_timed(name, dict(zip(what, got, strict=True)), wanted[family])
            rows.append(checked | {"passes": passes, **shape._asdict()})
            calls[name] = call
        del wanted
        seconds = clock_in_turn(calls, device=device, repeats=repeats, start=True)
    weights = {name: sum(p.numel() for p in layers[name].parameters()) for name in seconds}
    row = report(shape, passes, seconds, weights, peak)
    return [
        *rows,
        row | {"peak_bytes": memory, "missing": missing, "compiler": compiler or "none", "dtype": str(dtype)},
    ]


def as_call(
    layer: Attention, run: Callable[[Tensor], Tensor], x: Tensor, passes: str
) -> Callable[[], tuple[Tensor, ...]]:
    """The layer's output; or what a training step is for, the gradients of the input and of every weight."""
    if passes == "forward":

        @torch.no_grad()
        def forward() -> tuple[Tensor, ...]:
            return (run(x),)

        return forward
    leaves = [x.detach().requires_grad_(), *layer.parameters()]
    weights = torch.ones_like(x)
    weights[:, ::2] = -1  # a constant gradient would cancel in the softmax

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(run(leaves[0]), leaves, weights)

    return step


def operations(shape: Shape, weights: int, passes: str) -> float:
    """Floating-point operations of a layer: two a weight and token, and the causal half of two attention products.

    >>> operations(Shape(1, 2, 4, 1, 1), 64, "forward")  # 2·64·2, and 4·4 for each of three pairs
    304.0
    """
    pairs = shape.n * (shape.n + 1) / 2
    forward = 2.0 * weights * shape.b * shape.n + 4.0 * shape.b * shape.hidden * pairs
    return forward if passes == "forward" else 3 * forward


def report(
    shape: Shape, passes: str, seconds: dict[str, list[float]], weights: dict[str, int], peak: float
) -> dict[str, Any]:
    """One row: milliseconds with quantiles, operations a second, and ratios of times taken next to each other.

    `time_over_best_rope`: against the RoPE layer with the least median; `time_over_same_kernel`: where both name one.
    """
    times: dict[str, Times] = {name: quantiles(found) for name, found in seconds.items()}
    ropes = [name for name in times if family_of(name) == "rope"]
    best = min(ropes, key=lambda name: times[name].median)
    rate = {name: operations(shape, weights[name], passes) / t.median for name, t in times.items()}

    def over(name: str, other: str) -> dict[str, float]:
        return quantiles([a / b for a, b in zip(seconds[name], seconds[other], strict=True)]).spread

    others = [name for name in times if name not in ropes]
    twins = {name: name.replace(family_of(name), "rope", 1) for name in others}
    return {
        "kind": "layer",
        "passes": passes,
        **shape._asdict(),
        "d": shape.d,
        "milliseconds": {name: t.milliseconds for name, t in times.items()},
        "teraflops_a_second": {name: value / 1e12 for name, value in rate.items()},
        "of_matmul_peak": {name: value / peak for name, value in rate.items()},
        "best_rope": best,
        "time_over_best_rope": {name: over(name, best) for name in others},
        "time_over_same_kernel": {name: over(name, twin) for name, twin in twins.items() if twin in times},
    }
