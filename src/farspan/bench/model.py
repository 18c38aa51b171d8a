"""Training steps of complete models, of each attention in turn, and bodies of layouts."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from farspan.bench import SEED, Row, Steps
from farspan.bench.checks import WIDER, apart, check, worst
from farspan.bench.decode import make_config
from farspan.bench.layer import ALLOWED_GRAPHS
from farspan.bench.timing import in_turn, peak_bytes, ratio, spread
from farspan.configuration_farspan import FarspanConfig
from farspan.evaluation import as_trained
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.training.config import OptimizerSection
from farspan.training.loop import compile_blocks, flops_per_token, make_optimizer, matmul_peak
from farspan.training.pretraining import NextToken

LOSS = {torch.bfloat16: 1e-3, torch.float32: 1e-5}
"""How far a step's loss may be from that of the same weights in a wider dtype, relative to it."""
GRADIENTS = {torch.bfloat16: 0.25, torch.float32: 1e-2}
"""The same of each weight's gradient, by root mean squares.

The loss of random weights on random tokens hardly depends on the attention, while without it the gradients of its
weights are gone, an error of 1. Rounding to bfloat16 comes to 0.03 to 0.11 in 24 layers.
"""
TOKENS_AT_ONCE = 2048
"""Tokens of the wider step at a time, in complete rows; each block's activations are computed again."""


class Step:
    """A training step: forward and backward of `ids` (rows, length + 1), clipping, AdamW.

    A `body` step is forward and backward of the model without its head.
    """

    def __init__(self, model: FarspanForCausalLM, ids: Tensor, device: str, *, body: bool = False) -> None:
        self.model, self.ids, self.device, self.body = model, ids, device, body
        self.section = OptimizerSection()
        self.objective: Callable[[Tensor], Tensor] = partial(body_loss, model) if body else NextToken(model)
        self.optimizer = make_optimizer(model, self.section, device)

    def __call__(self) -> None:
        self.backward()
        if not self.body:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.section.clip)
            self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self) -> Tensor:
        """Return the loss; gradients are left in the model."""
        with as_trained(self.device):
            loss = self.objective(self.ids)
        loss.backward()
        return loss.detach()


def body_loss(model: FarspanForCausalLM, ids: Tensor) -> Tensor:
    """Return a number that every hidden state of the body has a part in."""
    hidden: Tensor = model.model(ids[:, :-1], use_cache=False).last_hidden_state
    signs = torch.ones(hidden.shape[-1], device=hidden.device)
    signs[::2] = 0.5  # the final norm leaves the plain mean of squares constant
    return (hidden.to(torch.promote_types(hidden.dtype, torch.float32)).square() * signs).mean()


def training(
    preset: str,
    *,
    variants: Sequence[str],
    length: int,
    rows: int,
    repeats: int,
    compile: bool,
    body: bool = False,
    window: int | None = None,
    device: str = "cpu",
) -> Steps:
    """Time training steps on `rows` × `length` random tokens, in bfloat16 on a GPU; RoPE comes first in any case.

    All models are held at once and step in turn, so that ratios of times are those of one machine in one state.

    Args:
        body: time forward and backward without the head.
        window: of the layouts among the variants.
    """
    names = list(dict.fromkeys(["rope", *variants]))
    configs = {x: make_config(preset, x, window, train_length=length) for x in names}  # raises early
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    calls: dict[str, Step] = {}
    figures: dict[str, Row] = {}

    def prepare(variant: str, config: FarspanConfig) -> list[Row]:
        torch.manual_seed(SEED)
        if not calls:
            torch.compiler.reset()
        model = FarspanForCausalLM(config).train().to(device)
        if compile:
            compile_blocks(model)
        ids = torch.randint(0, config.vocab_size, (rows, length + 1), device=device)
        work = calls[variant] = Step(model, ids, device, body=body)
        with torch._dynamo.config.patch(recompile_limit=ALLOWED_GRAPHS):
            work()  # compiles, and makes the moments
            found: Row = {"parameters": model.num_parameters(), "peak_bytes": peak_bytes(work, device)}
            found["flops_a_token"] = flops_per_token(model, length)
            figures[variant] = found | check_step(variant, work, dtype)  # of the weights that timed steps start from
        return []

    def timed() -> list[Row]:
        with torch._dynamo.config.patch(recompile_limit=ALLOWED_GRAPHS):
            seconds = in_turn(calls, repeats=repeats, device=device)
        peak, found = matmul_peak(torch.device(device), dtype), []
        label: Row = {"kind": "body" if body else "training", "preset": preset, "rows": rows, "length": length}
        label |= {"compile": compile} | ({"window": window} if window else {})
        for variant in names:
            over = ratio(seconds[variant], seconds["rope"])
            speed = rows * length / spread(seconds[variant])["median"]
            row = {**label, "attention": variant, "seconds": seconds[variant], "tokens_per_second": speed}
            row |= {"matmul_peak": peak, "mfu": speed * figures[variant]["flops_a_token"] / peak}
            found.append(row | {"time_over_rope": over.pop("median"), "range_over_rope": over} | figures[variant])
        calls.clear()
        return found

    what = f"{'body' if body else 'step'}, {rows} × {length:,}"
    found: Steps = [(f"{what}: {variant}", partial(prepare, variant, config)) for variant, config in configs.items()]
    return [*found, (f"{what}: timed", timed)]


def bodies(preset: str, layouts: Sequence[str], lengths: Sequence[int], *, device: str, **options: Any) -> Steps:
    """Time the body of a model in each layout at each length, 32,768 tokens at once on a GPU, full RoPE first."""
    rows = {n: max(1, 32_768 // n) if device == "cuda" else 1 for n in lengths}
    options |= {"body": True, "variants": layouts, "device": device}
    return [step for n in lengths for step in training(preset, length=n, rows=rows[n], **options)]


def check_step(variant: str, step: Step, dtype: torch.dtype) -> dict[str, float]:
    """Compare the loss and the gradients of a step, as it is timed in `dtype`, with a wider one.

    The wider step is the same weights' in :data:`~farspan.bench.checks.WIDER`, neither compiled nor under autocast.
    """
    loss = step.backward()
    twin = FarspanForCausalLM(step.model.config).train().to(step.ids.device, WIDER[dtype])
    twin.load_state_dict(step.model.state_dict())
    twin.gradient_checkpointing_enable()
    objective: Callable[[Tensor], Tensor] = partial(body_loss, twin) if step.body else NextToken(twin)
    want = torch.zeros((), dtype=torch.float64, device=step.ids.device)
    for piece in step.ids.split(max(1, TOKENS_AT_ONCE // step.ids.shape[1])):
        part = objective(piece) * (len(piece) / len(step.ids))
        part.backward()
        want += part.detach()
    found = check(f"{variant}, the loss of a step", loss, want, limit=LOSS[dtype])
    checks = []
    for (name, ours), theirs in zip(step.model.named_parameters(), twin.parameters(), strict=True):
        if ours.grad is None and theirs.grad is None:  # the head of a body
            continue
        assert ours.grad is not None
        assert theirs.grad is not None
        what = f"{variant}, the gradient of {name}"
        checks.append(check(what, ours.grad, theirs.grad, limit=GRADIENTS[dtype], error_of=apart))
    step.optimizer.zero_grad()
    return found | {f"gradient_{name}": value for name, value in worst(checks).items()}
