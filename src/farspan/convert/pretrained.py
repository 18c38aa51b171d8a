"""From a checkpoint on disk to a farspan model."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from farspan.convert.calibrate import CalibrationConfig, CalibrationReport, calibrate
from farspan.convert.configuration import read_config, write_config
from farspan.convert.folder import check_out, save
from farspan.convert.load import Progress, load
from farspan.convert.note import write_note
from farspan.convert.sources import open_source
from farspan.convert.target import AttentionArgument, local_and_global, replace_attention, target_specs
from farspan.convert.text import calibration_windows
from farspan.errors import require
from farspan.models import FarspanConfig, FarspanForCausalLM
from farspan.results import write_result


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
        keep_rope: after calibration, put so many of the worst layers back as RoPE.
        window: every layer sees so many keys; but of each `global_every` layers the last one, which sees all of them
            and has no positions (:func:`local_and_global`).
        dtype: of the weights; None keeps the source's (float32 for GGUF).
        progress: called with (what, done, of how many).

    ::

        model = farspan.convert.from_pretrained("SmolLM2-135M-Instruct.Q4_1.gguf", attention="coca-exact")
    """
    opened = open_source(Path(path))
    attention = _layout(attention, read_config(opened.config), window, global_every, keep_rope)
    model = load(opened, dtype=dtype, device=device, progress=progress)
    give_attention(model, attention, calibration, calibration_config, keep_rope=keep_rope, progress=progress)
    return model


def _layout(
    attention: AttentionArgument | None, config: FarspanConfig, window: int | None, global_every: int, keep_rope: int
) -> AttentionArgument | None:
    require(
        window is not None or global_every == 0,
        f"global_every needs window, what the other layers see, got {global_every} without; give one, say 512",
    )
    require(
        window is None or keep_rope == 0,
        f"keep_rope gives layers their whole text back, got {keep_rope} and window {window}; leave out one of them",
    )
    return attention if window is None else local_and_global(attention, config.num_hidden_layers, window, global_every)


def give_attention(
    model: FarspanForCausalLM,
    attention: AttentionArgument | None,
    calibration: Tensor | None = None,
    calibration_config: CalibrationConfig | None = None,
    *,
    keep_rope: int = 0,
    progress: Progress | None = None,
) -> CalibrationReport | None:
    """Replace a RoPE model's attention, fitted if there is text for it, otherwise from copied weights."""
    require(
        calibration is not None or keep_rope == 0,
        f"keep_rope needs calibration text to tell the worst layers, got {keep_rope} without; give both or name the "
        "layers in attention=[…]",
    )
    require(
        calibration is None or attention is not None,
        "calibration needs attention, the one to fit, got None; give for example attention='coca-exact'",
    )
    if attention is None:
        return None
    if calibration is not None:
        return calibrate(model, attention, calibration, calibration_config, keep_rope=keep_rope, progress=progress)
    for layer, spec in enumerate(target_specs(attention, model.config.attention_specs)):
        if spec != model.config.attention_specs[layer]:
            replace_attention(model, layer, spec)
    return None


def convert_folder(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    attention: AttentionArgument | None = None,
    *,
    to: str | None = None,
    text: Sequence[str] = (),
    tokens: int = 65_536,
    length: int = 512,
    calibration_config: CalibrationConfig | None = None,
    keep_rope: int = 0,
    window: int | None = None,
    global_every: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> CalibrationReport | None:
    """:func:`from_pretrained`, written to a new folder with the tokenizer, conversion.json (the source) and
    calibration.json, the report.

    to: write another family's format instead, where nothing is lost. text: sources as `farspan data` takes them, from
    which `tokens` in pieces of `length` (at most the training length, and a layer's window, beyond which there is
    nothing to fit) are taken to calibrate on.
    """
    check_out(Path(out))
    require(
        not text or attention is not None,
        f"--calibrate needs --attention, the one to fit, got {', '.join(text)} without; add --attention coca-exact",
    )
    opened = open_source(Path(source))
    config = read_config(opened.config)
    attention = _layout(attention, config, window, global_every, keep_rope)
    if attention is not None:
        config.attention = [spec.to_dict() for spec in target_specs(attention, config.attention_specs)]
    if to is not None:
        write_config(config, to)  # refuses what it would lose before any work is done
    length = min(length, config.train_length, window or length)
    ids = calibration_windows(opened, text, tokens, length) if text else None
    model = load(opened, dtype=dtype, device=device, progress=progress)
    report = give_attention(model, attention, ids, calibration_config, keep_rope=keep_rope, progress=progress)

    def beside(folder: Path) -> None:
        opened.carry(folder)
        if attention is not None and to is None:
            write_note(folder, Path(source))
        if report is not None:
            write_result(folder / "calibration.json", report.rows(), device=str(model.device), seed=0)

    save(model, Path(out), beside, to=to)
    return report
