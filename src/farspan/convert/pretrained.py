"""From a checkpoint on disk to a farspan model."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from farspan.convert.calibrate import CalibrationConfig, CalibrationReport, calibrate
from farspan.convert.configuration import config_of, write_config
from farspan.convert.folder import clear_out, orderly_end, save
from farspan.convert.load import Progress, load
from farspan.convert.note import write_note
from farspan.convert.sources import open_source
from farspan.convert.target import AttentionArgument, Target, replace_attention
from farspan.convert.text import calibration_windows
from farspan.errors import require
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.results import write_result

CALIBRATION_TOKENS = 262_144
"""How much text the layers are fitted on unless one says otherwise."""


def from_pretrained(
    path: str | os.PathLike[str],
    attention: AttentionArgument | None = "rope",
    *,
    calibration: Tensor | None = None,
    calibration_config: CalibrationConfig | None = None,
    keep_rope: int = 0,
    window: int | None = None,
    global_every: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> FarspanForCausalLM:
    """A LLaMA, Mistral, Qwen2, Qwen3 or SmolLM checkpoint as a farspan model.

    Args:
        path: a folder with config.json and safetensors, a .gguf file, or a farspan folder.
        attention: "rope" gives the source's logits; "coca-exact", "coca-slack" or "coca-strict", or a list with one
            entry a layer. A name keeps each layer's window and rotation; None keeps what a farspan folder has.
            Under dynamic NTK the logits of one forward pass are the source's, but `generate` takes one base for prompt
            and new tokens, where transformers changes it under a cache of older angles: there texts may differ.
        calibration: ids (windows, length) of text to fit CoCA layers on (:func:`calibrate`, which also returns a
            report); without it they start from copied weights, which is far from the source.
        calibration_config: how they are fitted (:class:`CalibrationConfig`: which weights, how many steps, how many
            windows at a time); None takes its defaults.
        keep_rope: after calibration, put so many layers back as RoPE, those with the largest error of the stream.
        window: every layer sees so many keys; but of each `global_every` layers the last one, which sees all of them
            and has no positions (:func:`local_and_global`).
        dtype: of the weights; None keeps the source's (float32 for GGUF).
        device: where the weights are put, and so where layers are fitted.
        progress: called with (what, done, of how many).

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    >>> llama = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    >>> with TemporaryDirectory() as folder:
    ...     llama.save_pretrained(folder)
    ...     model = from_pretrained(folder, attention="coca-exact")
    >>> [spec.name for spec in model.config.attention_specs]
    ['coca-exact']
    """
    target = Target(attention, window, global_every, keep_rope)
    opened = open_source(Path(path))
    target.specs(config_of(opened).attention_specs)  # refuses what cannot be before any work is done
    model = load(opened, dtype=dtype, device=device, progress=progress)
    give_attention(model, target, calibration, calibration_config, progress=progress)
    return model


def give_attention(
    model: FarspanForCausalLM,
    target: Target,
    calibration: Tensor | None = None,
    calibration_config: CalibrationConfig | None = None,
    *,
    progress: Progress | None = None,
) -> CalibrationReport | None:
    """Replace a RoPE model's attention, fitted if there is text for it, otherwise from copied weights."""
    require(
        calibration is not None or target.keep_rope == 0,
        f"keep_rope needs calibration text to tell the worst layers, got {target.keep_rope} without; give both or name "
        "the layers in attention=[…]",
    )
    require(
        calibration is None or target.attention is not None,
        "calibration needs attention, the one to fit, got None; give for example attention='coca-exact'",
    )
    specs = target.specs(model.config.attention_specs)
    if calibration is not None:
        keep = target.keep_rope
        return calibrate(model, specs, calibration, calibration_config, keep_rope=keep, progress=progress)
    for layer, spec in enumerate(specs):
        if spec != model.config.attention_specs[layer]:
            replace_attention(model, layer, spec)
    return None


@dataclass(frozen=True)
class Conversion:
    """What :func:`convert_folder` did."""

    report: CalibrationReport | None
    """How well the layers were fitted, where there was text for it."""
    copied: tuple[int, ...]
    """Layers that became CoCA without: their weights are the original's, but not yet what they compute."""


def convert_folder(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    attention: AttentionArgument | None = None,
    *,
    to: str | None = None,
    text: Sequence[str] = (),
    tokens: int = CALIBRATION_TOKENS,
    length: int = 512,
    calibration_config: CalibrationConfig | None = None,
    keep_rope: int = 0,
    window: int | None = None,
    global_every: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Conversion:
    """:func:`from_pretrained`, written to a new folder with the tokenizer, conversion.json (the source) and
    calibration.json, the report.

    to: write another family's format instead, where nothing is lost. text: sources as `farspan data` takes them, from
    which `tokens` in pieces of `length` (at most the training length, and a layer's window, beyond which there is
    nothing to fit) are taken to calibrate on.
    """
    clear_out(Path(out))
    require(
        not text or attention is not None,
        f"text needs attention, the one to fit, got {', '.join(text)} without; give for example attention='coca-exact'",
    )
    target, opened = Target(attention, window, global_every, keep_rope), open_source(Path(source))
    config = config_of(opened)
    before, specs = config.attention_specs, target.specs(config.attention_specs)
    config.attention = [spec.to_dict() for spec in specs]
    if to is not None:
        write_config(config, to)  # refuses what it would lose before any work is done
    with orderly_end(), TemporaryDirectory() as held:
        carried = Path(held) / "carried"  # a folder with ordinary rights, which are copied too
        carried.mkdir()
        opened.carry(carried)  # first, so that a broken tokenizer is refused before any work is done
        length = min(length, config.train_length, window or length)
        ids = calibration_windows(opened, text, tokens, length) if text else None
        model = load(opened, dtype=dtype, device=device, progress=progress)
        report = give_attention(model, target, ids, calibration_config, progress=progress)

        def beside(folder: Path) -> None:
            copytree(carried, folder, dirs_exist_ok=True)
            if attention is not None and to is None:
                write_note(folder, Path(source))
            if report is not None:
                write_result(folder / "calibration.json", report.rows(), device=str(model.device), seed=0)

        save(model, Path(out), beside, to=to)
    became = (i for i, (new, old) in enumerate(zip(specs, before, strict=True)) if new != old and new.kind == "coca")
    return Conversion(report, tuple(became) if report is None else ())
