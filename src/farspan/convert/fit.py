"""One CoCA layer fitted to the RoPE layer it replaces: a closed form to start from, then a short descent.

For one pair q = (a, b) of the teacher, with Δ = (m-n)θ_j and Σ = (m+n)θ_j, the scores are

    teacher   ⟨q, k⟩ cosΔ - (b k_a - a k_b) sinΔ        CoCA   t·(P cosΔ + Q sinΔ + R cosΣ + S sinΣ)

with P = ‖q‖² and no other term for exact, and the four of docs/math.md for slack, made from the student's own q. Over
angles spread evenly, the t that is nearest to the teacher in the least-squares sense is

    t(n) = ( E[P a - Q b]·k_a(n) + E[P b + Q a]·k_b(n) ) / E[P² + Q² + R² + S²]

with E over the queries: the key seen along the queries' mean direction, in units of their length. It is linear in k, so
W_T's row for a pair is a combination of the two rows of W_K. Copying W_K takes (½, ½) for every pair.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from farspan.layers import Attention
from farspan.ops.masking import make_mask
from farspan.ops.reference import repeat_heads, visible

PROJECTIONS = {"t": "t_proj", "q": "q_proj", "v": "v_proj", "o": "o_proj"}
"""What may be fitted, by letter."""


@dataclass(frozen=True)
class Rows:
    """What a layer did with an input: log-probabilities (b, h, n, n) and its output (b, n, hidden)."""

    log_weights: Tensor
    output: Tensor


def attention_rows(layer: Attention, x: Tensor) -> Rows:
    """All attention rows of a layer, for x (b, n, hidden). N×N: for windows of some hundred tokens."""
    q, k, v = layer.project(x)
    n = x.shape[1]
    mask = make_mask(n, n, len(x), x.device, causal=layer.causal, window=layer.spec.window)
    q, k = layer.features(q, k, mask, layer.rotary)
    scores = q @ repeat_heads(k, layer.num_heads).mT * layer.scaling
    log_weights = scores.masked_fill(~visible(mask), -torch.inf).log_softmax(-1)
    out = log_weights.exp() @ repeat_heads(v, layer.num_heads)
    return Rows(log_weights, layer.o_proj(out.transpose(1, 2).flatten(2)))


def divergence(teacher: Rows, student: Rows) -> Tensor:
    """Mean over rows of KL(teacher ‖ student); keys that neither may see count nothing."""
    hidden = teacher.log_weights.isneginf()
    difference = (teacher.log_weights - student.log_weights).masked_fill(hidden, 0)
    return (teacher.log_weights.exp() * difference).sum(-1).mean()


def output_error(teacher: Rows, student: Rows) -> Tensor:
    """‖student - teacher‖² / ‖teacher‖² of the outputs."""
    return (student.output - teacher.output).pow(2).sum() / teacher.output.pow(2).sum()


class QueryMoments:
    """Running sums over queries that give the closed form, for each key head and pair, in float64."""

    def __init__(self, student: Attention) -> None:
        self._form, self._heads = student.form, student.num_key_heads
        shape, device = (self._heads, student.head_dim // 2), student.q_proj.weight.device
        self._sums = [torch.zeros(shape, dtype=torch.float64, device=device) for _ in range(3)]

    def add(self, teacher_q: Tensor, student_q: Tensor) -> None:
        """Queries of both, (b, h, n, d), before rotation."""
        a, b = teacher_q.double().chunk(2, dim=-1)
        even, odd, power = amplitudes(student_q.double(), self._form)
        for total, part in zip(self._sums, (even * a - odd * b, even * b + odd * a, power), strict=True):
            total += part.unflatten(1, (self._heads, -1)).sum((0, 2, 3))

    def coefficients(self) -> Tensor:
        """(g, 2, d/2): what each member of a key's pair counts for in t."""
        first, second, power = self._sums
        return torch.stack((first, second), dim=1) / power.clamp(min=1e-30)[:, None]


def amplitudes(q: Tensor, form: str) -> tuple[Tensor, Tensor, Tensor]:
    """P, Q and P² + Q² + R² + S² for each pair of q (…, d)."""
    a, b = q.chunk(2, dim=-1)
    if form == "exact":
        square = a * a + b * b
        return square, torch.zeros_like(square), square * square
    even, odd, rest = (a + b) ** 2 / 2, (a * a - b * b) / 2, (a - b) ** 2 / 2
    return even, odd, even**2 + 2 * odd**2 + rest**2


def start_from_moments(student: Attention, teacher: Attention, moments: QueryMoments, x: Tensor) -> None:
    """Set W_T (and its bias) to the closed form.

    Under qk-norm t has a norm of its own, which takes the length of W_T x away again; its weight is started at the
    length that the closed form has on the sample x (b, n, hidden).
    """
    coefficients = moments.coefficients().to(x.dtype)
    if teacher.qk_norm:
        _, k, _ = teacher.project(x)
        wanted = (k.unflatten(-1, (2, -1)) * coefficients[:, None]).sum(-2)
        student.get_parameter("t_norm.weight").data.fill_(wanted.pow(2).mean().sqrt())
        coefficients = coefficients * teacher.get_parameter("k_norm.weight").detach().view(2, -1)
    for leaf in ("weight", "bias"):
        theirs, ours = (
            getattr(layer.get_submodule(name), leaf) for layer, name in ((teacher, "k_proj"), (student, "t_proj"))
        )
        if theirs is not None:
            pairs = theirs.detach().unflatten(0, (teacher.num_key_heads, 2, -1))  # g, member, pair, …
            ours.data.copy_(
                (pairs * coefficients.view(*coefficients.shape, *[1] * (pairs.ndim - 3))).sum(1).flatten(0, 1)
            )


class Batches(Protocol):
    """Inputs of the teacher and of the student for the same tokens, (b, n, hidden) each: a list, or made on demand."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]: ...

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]: ...


def start(student: Attention, teacher: Attention, batches: Batches) -> None:
    """The closed form over all batches."""
    moments = QueryMoments(student)
    with torch.no_grad():
        for theirs, ours in batches:
            moments.add(teacher.project(theirs)[0], student.project(ours)[0])
        start_from_moments(student, teacher, moments, batches[0][0])


@contextmanager
def moving(layer: Attention, fit: str) -> Iterator[list[Tensor]]:
    """The parameters that the letters of `fit` name, and for as long as the context lasts no others take gradients."""
    names = {PROJECTIONS[letter] for letter in fit} | ({"t_norm"} if "t" in fit else set())
    before = {parameter: parameter.requires_grad for parameter in layer.parameters()}
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name.split(".")[0] in names)
    try:
        yield [parameter for parameter in before if parameter.requires_grad]
    finally:
        for parameter, wanted in before.items():
            parameter.requires_grad_(wanted)
            parameter.grad = None


@torch.enable_grad()
def descend(student: Attention, teacher: Attention, batches: Batches, *, fit: str, steps: int, lr: float) -> None:
    """Adam on KL of the attention rows plus relative error of the output; `fit` has the letters of what may move."""
    warm = max(1, steps // 10)

    def schedule(step: int) -> float:
        return min(1.0, (step + 1) / warm) * (1 - step / steps)

    with moving(student, fit) as parameters:
        optimizer = torch.optim.Adam(parameters, lr=lr)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        for step in range(steps):
            theirs, ours = batches[step % len(batches)]
            with torch.no_grad():
                goal = attention_rows(teacher, theirs)
            rows = attention_rows(student, ours)
            optimizer.zero_grad()
            (divergence(goal, rows) + output_error(goal, rows)).backward()
            optimizer.step()
            scheduler.step()


@dataclass(frozen=True)
class Errors:
    """How far a student is from its teacher."""

    attention_kl: float
    output_error: float
    """Squared, relative to the teacher's output."""

    @property
    def total(self) -> float:
        """What :func:`descend` lowers."""
        return self.attention_kl + self.output_error


def measure(student: Attention, teacher: Attention, batches: Batches) -> Errors:
    """Mean errors over batches."""
    kl = relative = 0.0
    with torch.no_grad():
        for theirs, ours in batches:
            goal, rows = attention_rows(teacher, theirs), attention_rows(student, ours)
            kl += float(divergence(goal, rows)) / len(batches)
            relative += float(output_error(goal, rows)) / len(batches)
    return Errors(kl, relative)
