"""The whole model: training steps of each attention in turn, and the memory of one long window."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from farspan.benchmark.attention import check
from farspan.benchmark.measure import in_turn, measure
from farspan.evaluation import as_trained, perplexity
from farspan.models import FarspanConfig, FarspanForCausalLM
from farspan.training.config import OptimizerSection
from farspan.training.optimizer import compile_blocks, make_optimizer
from farspan.training.pretraining import NextToken
from farspan.training.speed import flops_per_token, matmul_peak

VARIANTS = ("rope", "coca-exact", "coca-slack", "coca-strict")


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
    yield "fused against the equations, float64", [check(device, seed)]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    peak = matmul_peak(torch.device(device), dtype)
    steps: dict[str, Callable[[], Any]] = {}
    figures: dict[str, dict[str, Any]] = {}
    for variant in variants:
        torch.manual_seed(seed)
        config = FarspanConfig.preset(preset, attention=variant, train_length=length)
        model = FarspanForCausalLM(config).train().to(device)
        if compile:
            compile_blocks(model)
        ids = torch.randint(0, config.vocab_size, (rows, length + 1), device=device)
        steps[variant] = _step(model, ids, device)
        steps[variant]()  # compiles, and makes the moments
        figures[variant] = {
            "parameters": model.num_parameters(),
            "peak_bytes": measure(steps[variant], repeats=0, device=device).peak_bytes,
            "flops_a_token": flops_per_token(model, length),
        }
        yield f"{variant} ready", []
    seconds = in_turn(steps, repeats=repeats, device=device)
    base = seconds[variants[0]]
    for variant in variants:
        median = statistics.median(seconds[variant])
        ratios = [ours / theirs for ours, theirs in zip(seconds[variant], base, strict=True)]
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
            f"time_over_{variants[0]}": statistics.median(ratios),
            **figures[variant],
        }
        yield f"{variant}: timed", [row]


def _step(model: FarspanForCausalLM, ids: Tensor, device: str) -> Callable[[], None]:
    section = OptimizerSection()
    optimizer, objective = make_optimizer(model, section, device), NextToken(model)

    def step() -> None:
        with as_trained(device):
            loss = objective(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), section.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


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
