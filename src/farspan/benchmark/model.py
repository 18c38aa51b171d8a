"""The whole model: training steps of each attention in turn, and the memory of one long window."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from farspan.benchmark.attention import check
from farspan.benchmark.clock import quantiles
from farspan.benchmark.measure import in_turn, measure
from farspan.benchmark.truth import WIDER, apart, far, refuse_beyond
from farspan.configuration_farspan import FarspanConfig
from farspan.evaluation import as_trained, perplexity
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.training.config import OptimizerSection
from farspan.training.optimizer import compile_blocks, make_optimizer
from farspan.training.pretraining import NextToken
from farspan.training.speed import flops_per_token, matmul_peak

VARIANTS = ("rope", "coca-exact", "coca-slack", "coca-strict")
LOSS = {torch.bfloat16: 1e-3, torch.float32: 1e-5}
"""How far a step's loss may be from that of the same weights in a wider dtype, as a part of it."""
GRADIENTS = {torch.bfloat16: 0.5, torch.float32: 1e-2}
"""The same of each weight's gradient, by root mean squares.

The loss of random weights on random tokens hardly depends on the attention, while without it the gradients of its
weights are gone, an error of 1. Rounding to bfloat16 comes to 0.02 to 0.1 in eight layers.
"""
TOKENS_AT_ONCE = 2048
"""Of the wider step, in whole rows: its activations are those of a model that is not compiled."""


def training(
    preset: str = "350m",
    *,
    variants: Sequence[str] = VARIANTS,
    length: int = 512,
    rows: int = 64,
    repeats: int = 10,
    compile: bool = True,
    device: str = "cpu",
    seed: int = 0,
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield (what was done, its rows): the check, one row of figures for each attention.

    A step is forward, backward, clipping and AdamW on `rows` × `length` random tokens, in bf16 on a GPU. All models are
    held at once and step in turn, so that the ratios of times are those of one machine in one state.
    """
    configs = {v: FarspanConfig.preset(preset, attention=v, train_length=length) for v in variants}
    yield "fused against the equations, float64", [check(device, seed)]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    peak = matmul_peak(torch.device(device), dtype)
    steps: dict[str, Callable[[], Any]] = {}
    figures: dict[str, dict[str, Any]] = {}
    for variant, config in configs.items():
        torch.manual_seed(seed)
        model = FarspanForCausalLM(config).train().to(device)
        if compile:
            compile_blocks(model)
        ids = torch.randint(0, config.vocab_size, (rows, length + 1), device=device)
        work = Step(model, ids, device)
        steps[variant] = work
        work()  # compiles, and makes the moments
        figures[variant] = {
            "parameters": model.num_parameters(),
            "peak_bytes": measure(work, repeats=0, device=device).peak_bytes,
            "flops_a_token": flops_per_token(model, length),
        }
        figures[variant] |= check_step(variant, work, dtype)  # of the weights that the first timed step starts from
        yield f"{variant} ready", []
    seconds = in_turn(steps, repeats=repeats, device=device)
    base = seconds[variants[0]]
    for variant in variants:
        median = statistics.median(seconds[variant])
        ratio = quantiles([ours / theirs for ours, theirs in zip(seconds[variant], base, strict=True)])
        speed = rows * length / median
        row = {
            "kind": "training",
            "preset": preset,
            "attention": variant,
            "rows": rows,
            "length": length,
            "compile": compile,
            "seconds": seconds[variant],
            "tokens_per_second": speed,
            "matmul_peak": peak,
            "mfu": speed * figures[variant]["flops_a_token"] / peak,
            f"time_over_{variants[0]}": ratio.median,
            f"range_over_{variants[0]}": {"low": ratio.low, "high": ratio.high},
            **figures[variant],
        }
        yield f"{variant}: timed", [row]


def parts(variants: Sequence[str] = VARIANTS, *, read: bool = True) -> int:
    """How many steps :func:`training` yields, and with `read` :func:`window` too.

    >>> parts(["rope", "coca-exact"]), parts(["rope", "coca-exact"], read=False)
    (7, 5)
    """
    return 1 + (3 if read else 2) * len(variants)


class Step:
    """A training step: forward and backward of `ids` (rows, length + 1), clipping, AdamW."""

    def __init__(self, model: FarspanForCausalLM, ids: Tensor, device: str) -> None:
        self.model, self.ids, self.device = model, ids, device
        self.section = OptimizerSection()
        self.optimizer, self.objective = make_optimizer(model, self.section, device), NextToken(model)

    def __call__(self) -> None:
        self.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.section.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self) -> Tensor:
        """The loss; gradients are left in the model."""
        with as_trained(self.device):
            loss: Tensor = self.objective(self.ids)
        loss.backward()
        return loss.detach()


def check_step(variant: str, step: Step, dtype: torch.dtype) -> dict[str, Any]:
    """Fields of a row: the loss of a step and its gradients, as they are timed in `dtype`, against a wider one.

    The wider step is the same weights' in :data:`WIDER`, neither compiled nor under autocast.

    Raises:
        ResultsDifferError: the loss or a gradient is too far off.
    """
    loss = step.backward()
    twin = FarspanForCausalLM(step.model.config).train().to(step.ids.device, WIDER[dtype])
    twin.load_state_dict(step.model.state_dict())
    objective, want = NextToken(twin), torch.zeros((), dtype=torch.float64, device=step.ids.device)
    for piece in step.ids.split(max(1, TOKENS_AT_ONCE // step.ids.shape[1])):
        part = objective(piece) * (len(piece) / len(step.ids))
        part.backward()
        want += part.detach()
    errors = {"loss of a step": (far(loss, want), LOSS[dtype])}
    for (name, ours), theirs in zip(step.model.named_parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        errors[f"gradient of {name}"] = apart(ours.grad, theirs.grad), GRADIENTS[dtype]
    for what, (error, allowed) in errors.items():
        refuse_beyond(allowed, error, f"{variant}, {what}", want)
    step.optimizer.zero_grad()
    (loss_error, loss_allowed), *gradients = errors.values()
    return {
        "error_as_timed": loss_error,
        "allowed_as_timed": loss_allowed,
        "gradient_error_as_timed": max(error for error, _ in gradients),
        "gradient_allowed_as_timed": GRADIENTS[dtype],
    }


def window(
    preset: str = "350m",
    *,
    variants: Sequence[str] = VARIANTS,
    length: int = 32_768,
    chunk: int = 8192,
    device: str = "cpu",
    seed: int = 0,
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield (what was done, its row): the memory of reading one window for its perplexity, weights included."""
    for variant in variants:
        torch.manual_seed(seed)
        config = FarspanConfig.preset(preset, attention=variant)
        model = FarspanForCausalLM(config).eval().to(device)
        text = torch.randint(0, config.vocab_size, (length,))

        def read(model: FarspanForCausalLM = model, text: Tensor = text) -> None:
            with as_trained(device):
                perplexity(model, [text], length=length, tokens_at_once=length, chunk=chunk)

        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        result = measure(read, repeats=1, device=device)
        row = {
            "kind": "window",
            "preset": preset,
            "attention": variant,
            "length": length,
            "chunk": chunk,
            "weight_bytes": weights,
            "peak_bytes": weights + result.peak_bytes,
            "seconds": result.seconds,
        }
        del model
        yield f"{variant}: {length} tokens read", [row]
