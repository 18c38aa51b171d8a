"""Give a RoPE model CoCA layer by layer, each fitted on text so that its attention matches the layer it replaces."""

import math
import time
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from farspan.convert.fit import PROJECTIONS, Batches, Errors, descend, measure, start
from farspan.convert.load import Progress
from farspan.convert.streams import Streams
from farspan.convert.target import AttentionArgument, replace_attention, restore_attention, target_specs
from farspan.errors import require
from farspan.layers import Attention, AttentionSpec
from farspan.modeling_farspan import FarspanBlock, FarspanForCausalLM


@dataclass(frozen=True)
class CalibrationConfig:
    """How to fit.

    Args:
        fit: what may move, by letter: t (W_T), q, v, o. "" keeps the closed form.
        steps: of Adam a layer.
        lr: its learning rate, warmed up over a tenth of the steps and lowered to zero.
        batch: windows a step.
        inputs: "student" fits each layer on what the layers below now give it, so that it can make up for them;
            "teacher" on what the original gave it.
        held_out: share of the windows, at least one, that nothing is fitted on: the report is about them, and they
            decide whether a layer keeps its descent or its closed form, and which layers are the worst.
    """

    fit: str = "tq"
    steps: int = 100
    lr: float = 3e-3
    batch: int = 2
    inputs: str = "student"
    held_out: float = 0.125

    def __post_init__(self) -> None:
        require(
            set(self.fit) <= set(PROJECTIONS),
            f"fit must be made of the letters {''.join(PROJECTIONS)}, got {self.fit!r}",
        )
        require(self.inputs in ("student", "teacher"), f"inputs must be 'student' or 'teacher', got {self.inputs!r}")
        require(
            0 < self.held_out < 1,
            f"held_out must be a share of the windows between 0 and 1, got {self.held_out}; try 0.125",
        )
        require(self.steps >= 0 and self.batch >= 1, f"steps must be ≥ 0 and batch ≥ 1, got {self.steps}, {self.batch}")


@dataclass(frozen=True)
class LayerReport:
    """One layer: what it became, and its errors on held-out windows with a copied W_K, the closed form, and fitted."""

    layer: int
    attention: str
    copied: Errors
    closed: Errors
    fitted: Errors
    stream_error: float
    """‖error of the output‖² relative to the residual stream it is added to, a token: what the layers above feel."""
    seconds: float


@dataclass(frozen=True)
class CalibrationReport:
    """All layers, and what it took."""

    layers: tuple[LayerReport, ...]
    kept: tuple[int, ...]
    """Layers that stay RoPE, the worst by `stream_error`."""
    tokens: int
    seconds: float

    def rows(self) -> list[dict[str, Any]]:
        """One plain mapping a layer, for a result file."""
        return [{**asdict(layer), "kept_rope": layer.layer in self.kept} for layer in self.layers]


def calibrate(
    model: FarspanForCausalLM,
    attention: AttentionArgument,
    ids: Tensor,
    config: CalibrationConfig | None = None,
    *,
    keep_rope: int = 0,
    progress: Progress | None = None,
) -> CalibrationReport:
    """Replace a RoPE model's attention in place, fitted on ids (windows, length); the report says how well.

    Layers are done from below. Memory is for the model, a few copies of one layer's attention and a batch of windows;
    the hidden states of all windows, two times ids.numel() · hidden_size numbers of the model's dtype, lie on a GPU
    that has room, else in the temporary folder (:class:`Streams`).
    `keep_rope` puts the worst layers back as they were: a mixed model. The layers above them were fitted on what the
    replaced ones gave.

    >>> from farspan import FarspanConfig
    >>> teacher = FarspanForCausalLM(FarspanConfig.preset("tiny", attention="rope"))
    >>> report = calibrate(teacher, "coca-exact", torch.randint(0, 512, (8, 16)), CalibrationConfig(steps=2))
    >>> len(report.layers), teacher.config.attention_specs[0].name
    (4, 'coca-exact')
    """
    config = config or CalibrationConfig()
    _check(model, ids, keep_rope)
    specs, began = target_specs(attention, model.config.attention_specs), time.monotonic()
    fitted = _to_fit(specs, model.config.attention_specs, ids.shape[1])
    held = min(max(1, round(len(ids) * config.held_out)), len(ids) - 1)
    streams, reports, worst = Streams(model, ids, config.batch), list[LayerReport](), list[Replaced]()
    for index, (block, spec) in enumerate(zip(model.model.layers, specs, strict=True)):
        original: Attention = block.self_attn
        if spec != original.spec:
            student = replace_attention(model, index, spec)
        if index in fitted:
            reports.append(_fitted(index, student, original, block, streams, held, config))
            worst = sorted([*worst, (reports[-1].stream_error, index, original)], key=lambda one: -one[0])[:keep_rope]
        if index < max(fitted):
            streams.advance(block, original, block.self_attn if config.inputs == "student" else original)
        if progress is not None:
            progress("calibrating", index + 1, len(specs))
    for _, index, original in worst:
        restore_attention(model, index, original)
    kept = tuple(sorted(index for _, index, _ in worst))
    return CalibrationReport(tuple(reports), kept, ids.numel(), time.monotonic() - began)


Replaced = tuple[float, int, Attention]
"""How bad a layer became, its number, and what it was."""


def _to_fit(new: Sequence[AttentionSpec], old: Sequence[AttentionSpec], length: int) -> list[int]:
    """The layers that become CoCA: RoPE with another window or none has its weights already."""
    changed = [index for index in range(len(new)) if new[index] != old[index]]
    fitted = [index for index in changed if new[index].kind == "coca"]
    require(
        bool(fitted),
        f"calibration needs CoCA layers to fit, got {sorted({spec.name for spec in new})}; leave it out",
    )
    windows = [(new[index].window, old[index].window) for index in changed]
    narrowest = min((window for window, before in windows if window and window != before), default=length)
    require(
        length <= narrowest,
        f"ids must have windows of at most {narrowest} tokens, what a new layer sees, got {length}; cut shorter",
    )
    return fitted


def _fitted(
    index: int,
    student: Attention,
    original: Attention,
    block: FarspanBlock,
    streams: Streams,
    held: int,
    config: CalibrationConfig,
) -> LayerReport:
    """Fit a fresh student in float32, and say how it went on the windows held out."""
    began, teacher, work = time.monotonic(), deepcopy(original).float(), deepcopy(student).float()
    train, test = streams.inputs(block, slice(-held)), streams.inputs(block, slice(-held, None))
    copied = measure(work, teacher, test)
    start(work, teacher, train)
    closed = fitted = measure(work, teacher, test)
    if config.fit and config.steps:
        before = deepcopy(work.state_dict())
        descend(work, teacher, train, fit=config.fit, steps=config.steps, lr=config.lr)
        fitted = measure(work, teacher, test)
        if not fitted.total <= closed.total:  # too little text, learnt by heart; or it diverged: NaN is not ≤
            work.load_state_dict(before)
            fitted = closed
    student.load_state_dict(work.state_dict())
    felt = _stream_error(work, teacher, test, streams.original(slice(-held, None)))
    require(
        math.isfinite(fitted.total) and math.isfinite(felt),
        f"layer {index} must compute finite numbers from the text, got an error of {fitted.total} in "
        f"{student.q_proj.weight.dtype}; convert in a dtype of wider range, float32 or bfloat16",
    )
    return LayerReport(index, student.spec.name, copied, closed, fitted, felt, time.monotonic() - began)


@torch.no_grad()
def _stream_error(student: Attention, teacher: Attention, test: Batches, hidden: Iterable[Tensor]) -> float:
    """Mean over tokens of ‖error‖² / ‖stream after the layer‖²: a sum would see only the few tokens of giant norm."""
    total, tokens = 0.0, 0
    for (theirs, ours), below in zip(test, hidden, strict=True):
        goal = teacher(theirs)
        error = student(ours) - goal
        ratio = error.pow(2).sum(-1) / (below + goal).pow(2).sum(-1)
        total, tokens = total + float(ratio.sum()), tokens + ratio.numel()
    return total / tokens


def _check(model: FarspanForCausalLM, ids: Tensor, keep_rope: int) -> None:
    config = model.config
    require(
        ids.ndim == 2 and len(ids) >= 2 and not ids.is_floating_point(),
        f"ids must be whole numbers of shape (windows ≥ 2, length), got {ids.dtype} {tuple(ids.shape)}; cut the text",
    )
    require(
        ids.shape[1] <= config.train_length,
        f"ids must have windows of at most the training length {config.train_length}, got {ids.shape[1]}; cut shorter",
    )
    require(
        int(ids.max()) < config.vocab_size and int(ids.min()) >= 0,
        f"ids must lie below vocab_size = {config.vocab_size}, got {int(ids.max())}; use the model's own tokenizer",
    )
    layers = config.num_hidden_layers
    require(0 <= keep_rope <= layers, f"keep_rope must be 0 … {layers} layers, got {keep_rope}; lower it")
