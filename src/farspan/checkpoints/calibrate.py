"""Fit new attention layers on text, one by one, so that each matches the RoPE layer that it replaces.

CoCA starts from a closed form. For one pair q = (a, b) of the teacher, with Δ = (m-n)θ_j and Σ = (m+n)θ_j, scores are

    teacher   ⟨q, k⟩ cosΔ - (b k_a - a k_b) sinΔ        CoCA   t·(P cosΔ + Q sinΔ + R cosΣ + S sinΣ)

with P = ‖q‖² and no other term for exact, and the four of docs/math.md for slack, made from the student's own q. Over
angles spread evenly, the t that is nearest to the teacher in the least-squares sense is

    t(n) = ( E[P a - Q b]·k_a(n) + E[P b + Q a]·k_b(n) ) / E[P² + Q² + R² + S²]

with E over the queries: the key along the queries' mean direction, in units of their length. It is linear in k, so
W_T's row for a pair is a combination of the two rows of W_K. Copying W_K takes (½, ½) for every pair. Then, and for all
other kinds from the start, gradient descent fits W_Q and W_K (or W_T).
"""

import math
import time
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farspan.checkpoints.replace import Target, replace_attention
from farspan.errors import require
from farspan.layers import Attention, AttentionSpec
from farspan.modeling_farspan import FarspanBlock, FarspanForCausalLM
from farspan.ops.masking import make_mask
from farspan.ops.reference import repeat_heads, visible
from farspan.utils import Progress, silent

PASS = 8192
"""Tokens that go through a block together on a GPU: fewer leave it idle."""
FITTED = ("q_proj", "k_proj", "t_proj", "t_norm", "phase")
Batches = Sequence[tuple[Tensor, ...]]
"""Inputs of the teacher and of the student for the same tokens, (b, n, hidden) each."""


@dataclass(frozen=True)
class CalibrationConfig:
    """How to fit.

    Args:
        steps: steps of Adam per layer; 0 keeps the closed form.
        lr: learning rate, warmed up over a tenth of the steps and lowered to zero.
        batch: sequences per step.
        held_out: share of the sequences, at least one, that nothing is fitted on. The report is about them, and they
            decide whether a layer keeps its descent.
    """

    steps: int = 100
    lr: float = 3e-3
    batch: int = 2
    held_out: float = 0.125

    def __post_init__(self) -> None:
        require(0 < self.held_out < 1, f"held_out must be a share between 0 and 1, got {self.held_out}; try 0.125")
        require(self.steps >= 0 and self.batch >= 1, f"steps must be ≥ 0 and batch ≥ 1, got {self.steps}, {self.batch}")


@dataclass(frozen=True)
class CalibrationReport:
    """What was fitted, the tokens it was fitted on, and the time it took."""

    layers: tuple[dict[str, Any], ...]
    """A row per fitted layer, with its errors on held-out sequences: `copied` for copied weights, `closed` in closed
    form, `fitted` at the end. Each has `attention_kl` and `output_error`, squared and relative to the teacher's."""
    tokens: int
    seconds: float


def calibrate(
    model: FarspanForCausalLM,
    attention: str | Target,
    ids: Tensor,
    config: CalibrationConfig | None = None,
    *,
    progress: Progress = silent,
) -> CalibrationReport:
    """Replace a RoPE model's attention in place, fitted on ids (sequences, length); the report says how well.

    Layers are done from below, each on what the layers before it now give. RoPE layers that only get a window keep
    their weights. Beside the model, CPU memory holds the hidden states of all sequences: 2 · ids.numel() · hidden_size
    numbers of the model's dtype, 0.6 GB for 262,144 tokens and SmolLM2-135M in bfloat16.

    >>> from farspan import FarspanConfig
    >>> teacher = FarspanForCausalLM(FarspanConfig.preset("tiny", attention="rope"))
    >>> report = calibrate(teacher, "coca-exact", torch.randint(0, 512, (8, 16)), CalibrationConfig(steps=2))
    >>> len(report.layers), teacher.config.attention_specs[0].name
    (4, 'coca-exact')
    """
    config, began = config or CalibrationConfig(), time.monotonic()
    require(
        ids.ndim == 2 and len(ids) >= 2 and not ids.is_floating_point(),
        f"ids must be whole numbers of shape (sequences ≥ 2, length), got {ids.dtype} {tuple(ids.shape)}; cut the text",
    )
    top = model.config.vocab_size
    require(
        int(ids.min()) >= 0 and int(ids.max()) < top,
        f"ids must lie below vocab_size = {top}, got {int(ids.max())}; use the model's own tokenizer",
    )
    old = model.config.attention_specs
    specs = (attention if isinstance(attention, Target) else Target(attention)).specs(model.config)
    changed = [index for index in range(len(old)) if specs[index] != old[index]]
    fitted = [index for index in changed if needs_fit(specs[index], old[index])]
    require(
        bool(fitted),
        f"calibration needs layers of another kind to fit, got {sorted({spec.name for spec in specs})}; "
        "give attention, for example coca-exact, or no text",
    )
    windows = [specs[index].window for index in changed if specs[index].window != old[index].window]
    most = min([model.config.train_length, *filter(None, windows)])
    require(
        ids.shape[1] <= most,
        f"ids must have at most {most} tokens per sequence, the training length or a new window, got {ids.shape[1]}; "
        "cut shorter",
    )
    held = min(max(1, round(len(ids) * config.held_out)), len(ids) - 1)
    streams, rows = Streams(model, ids, config.batch), list[dict[str, Any]]()
    for index, (block, spec) in enumerate(zip(model.model.layers, specs, strict=True)):
        original: Attention = block.self_attn
        if spec != old[index]:
            student = replace_attention(model, index, spec)
        if index in fitted:
            rows.append(_fit_layer(index, student, original, block, streams, held, config))
        if index < fitted[-1]:
            streams.advance(block, original, block.self_attn if index in fitted else original)
        progress(index + 1, len(specs), "calibrating", phase="calibrating")
    return CalibrationReport(tuple(rows), ids.numel(), time.monotonic() - began)


def needs_fit(new: AttentionSpec, old: AttentionSpec) -> bool:
    """Return whether a layer's weights must change: another kind, or no positions where there were some."""
    return new.name != old.name or new.rotary != old.rotary


def _fit_layer(
    index: int,
    student: Attention,
    original: Attention,
    block: FarspanBlock,
    streams: "Streams",
    held: int,
    config: CalibrationConfig,
) -> dict[str, Any]:
    """Fit a new layer in float32, and return its row of the report, with errors on the held-out sequences."""
    began, teacher, work = time.monotonic(), deepcopy(original).float(), deepcopy(student).float()
    train, test = (Inputs(streams, block, part) for part in (slice(-held), slice(-held, None)))
    copied = closed = measure(work, teacher, test)
    if work.spec.kind == "coca" and not work.spec.polar:
        start_closed_form(work, teacher, train)
        closed = measure(work, teacher, test)
    fitted = closed
    if config.steps:
        before = deepcopy(work.state_dict())
        descend(work, teacher, train, steps=config.steps, lr=config.lr)
        fitted = measure(work, teacher, test)
        if not sum(fitted.values()) <= sum(closed.values()):  # too little text, or it diverged: NaN is not ≤
            work.load_state_dict(before)
            fitted = closed
    student.load_state_dict(work.state_dict())
    require(
        math.isfinite(sum(fitted.values())),
        f"layer {index} computes numbers that are not finite in {student.q_proj.weight.dtype}; "
        "convert in a dtype of wider range, float32 or bfloat16",
    )
    found = {"copied": copied, "closed": closed, "fitted": fitted}
    return {"layer": index, "attention": student.spec.name, **found, "seconds": time.monotonic() - began}


# One layer


def attention_rows(layer: Attention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities (b, h, n, n) and output of a layer for x (b, n, hidden), some hundred tokens long."""
    q, k, v = layer.project(x)
    n = x.shape[1]
    mask = make_mask(n, n, len(x), x.device, causal=layer.causal, window=layer.spec.window)
    q, k = layer.features(q, k, mask, layer.rotary)
    scores = q @ repeat_heads(k, layer.num_heads).mT * layer.scaling
    log_weights = scores.masked_fill(~visible(mask), -torch.inf).log_softmax(-1)
    out = log_weights.exp() @ repeat_heads(v, layer.num_heads)
    return log_weights, layer.o_proj(out.transpose(1, 2).flatten(2))


def errors(student: Attention, teacher: Attention, theirs: Tensor, ours: Tensor) -> tuple[Tensor, Tensor]:
    """Compute KL(teacher ‖ student), the mean over attention rows, and ‖student - teacher‖² / ‖teacher‖² of outputs."""
    with torch.no_grad():
        log_goal, goal = attention_rows(teacher, theirs)
    log_weights, output = attention_rows(student, ours)
    difference = (log_goal - log_weights).masked_fill(log_goal.isneginf(), 0)
    return (log_goal.exp() * difference).sum(-1).mean(), (output - goal).pow(2).sum() / goal.pow(2).sum()


@torch.no_grad()
def measure(student: Attention, teacher: Attention, batches: Batches) -> dict[str, float]:
    """Compute the means over batches of the two errors that the descent lowers."""
    found = torch.stack([torch.stack(errors(student, teacher, *batch)) for batch in batches]).double().mean(0)
    return dict(zip(("attention_kl", "output_error"), found.tolist(), strict=True))


@torch.no_grad()
def start_closed_form(student: Attention, teacher: Attention, batches: Batches) -> None:
    """Set W_T (and its bias) to the closed form.

    Under qk-norm t has a norm of its own, which removes the length of W_T x again; its weight starts at the length that
    the closed form has on the first batch.
    """
    groups = student.num_key_heads
    queries = ((teacher.project(theirs)[0].double(), student.project(ours)[0].double()) for theirs, ours in batches)
    coefficients = closed_form(queries, student.form, groups).to(batches[0][0].dtype)
    if teacher.qk_norm:
        k = teacher.project(batches[0][0])[1]
        wanted = (k.unflatten(-1, (2, -1)) * coefficients[:, None]).sum(-2)
        student.get_parameter("t_norm.weight").fill_(wanted.pow(2).mean().sqrt())
        coefficients = coefficients * teacher.get_parameter("k_norm.weight").view(2, -1)
    for name, ours in student.get_submodule("t_proj").named_parameters():
        pairs = teacher.get_parameter(f"k_proj.{name}").unflatten(0, (groups, 2, -1))  # g, member, pair, …
        ours.copy_((pairs * coefficients.view(*coefficients.shape, *[1] * (pairs.ndim - 3))).sum(1).flatten(0, 1))


def closed_form(queries: Iterable[tuple[Tensor, Tensor]], form: str, groups: int) -> Tensor:
    """Return (groups, 2, d/2): the coefficient in t of each member of a key's pair.

    Args:
        queries: batches of un-rotated queries (b, h, n, d) of the teacher and of the student.
    """
    sums: Any = 0
    for theirs, ours in queries:
        (a, b), (x, y) = theirs.chunk(2, dim=-1), ours.chunk(2, dim=-1)
        if form == "exact":
            even, odd = x * x + y * y, torch.zeros_like(x)
            power = even * even
        else:
            even, odd, rest = (x + y) ** 2 / 2, (x * x - y * y) / 2, (x - y) ** 2 / 2
            power = even**2 + 2 * odd**2 + rest**2
        parts = torch.stack((even * a - odd * b, even * b + odd * a, power))
        sums = sums + parts.unflatten(2, (groups, -1)).sum((1, 3, 4))
    return torch.stack((sums[0], sums[1]), dim=1) / sums[2].clamp(min=1e-30)[:, None]


@torch.enable_grad()
def descend(student: Attention, teacher: Attention, batches: Batches, *, steps: int, lr: float) -> None:
    """Run Adam on KL of the attention rows plus relative error of the output; only queries and keys change."""
    warm = max(1, steps // 10)
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(name.split(".")[0] in FITTED)
    optimizer = torch.optim.Adam([p for p in student.parameters() if p.requires_grad], lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / warm) * (1 - s / steps))
    for step in range(steps):
        optimizer.zero_grad()
        sum(errors(student, teacher, *batches[step % len(batches)])).backward()  # type: ignore[union-attr]
        optimizer.step()
        schedule.step()


# Hidden states of all sequences on their way up through a model


class Streams:
    """The input of each layer in the original and in the new model: (sequences, length, hidden) each, on the CPU.

    In the model's dtype, and one tensor as long as both agree.
    """

    @torch.no_grad()
    def __init__(self, model: FarspanForCausalLM, ids: Tensor, batch: int) -> None:
        embed = model.model.embed_tokens
        self.batch, self.device = batch, model.device
        self.teacher = self.student = torch.cat([embed(rows.to(self.device)).cpu() for rows in ids.split(batch)])

    @torch.no_grad()
    def advance(self, block: FarspanBlock, teacher: Attention, student: Attention) -> None:
        """Send both through a block, each with its own attention; once, as long as they agree."""
        if self.student is self.teacher and student is not teacher:
            self.student = self.teacher.clone()
        step = self.batch if self.device.type == "cpu" else max(self.batch, PASS // self.teacher.shape[1])
        both = ((self.teacher, teacher), (self.student, student))
        for stream, attention in both[: 1 if self.student is self.teacher else 2]:
            for part in stream.split(step):
                h = part.to(self.device)
                h = h + attention(block.input_layernorm(h))
                part.copy_(h + block.mlp(block.post_attention_layernorm(h)))


class Inputs(Sequence[tuple[Tensor, ...]]):
    """Inputs of a block's attention in the original and the new model, in float32, each batch made when it is read."""

    def __init__(self, streams: Streams, block: FarspanBlock, part: slice) -> None:
        self._norm, self._device = block.input_layernorm, streams.device
        both = (stream[part].split(streams.batch) for stream in (streams.teacher, streams.student))
        self.hidden = list(zip(*both, strict=True))

    def __len__(self) -> int:
        return len(self.hidden)

    @torch.no_grad()
    def __getitem__(self, index: Any) -> Any:
        return tuple(self._norm(hidden.to(self._device)).float() for hidden in self.hidden[index])
