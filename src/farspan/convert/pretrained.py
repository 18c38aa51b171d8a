"""From a checkpoint on disk to a farspan model."""

import os
from pathlib import Path

import torch

from farspan.convert.folder import check_out, save
from farspan.convert.load import Progress, load
from farspan.convert.sources import Source, open_source
from farspan.convert.target import AttentionArgument, replace_attention, target_specs
from farspan.models import FarspanForCausalLM


def from_pretrained(
    path: str | os.PathLike[str],
    attention: AttentionArgument | None = "rope",
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> FarspanForCausalLM:
    """A LLaMA, Mistral, Qwen2, Qwen3 or SmolLM checkpoint as a farspan model.

    Args:
        path: a folder with config.json and safetensors, a .gguf file, or a farspan folder.
        attention: "rope" gives the source's logits; "coca-exact", "coca-slack" or "coca-strict", or a list with one
            entry a layer. A name keeps each layer's window and rotation; None keeps what a farspan folder has.
        dtype: of the weights; None keeps the source's (float32 for GGUF).
        progress: called with (what, done, of how many).

    ::

        model = farspan.convert.from_pretrained("SmolLM2-135M-Instruct.Q4_1.gguf", attention="coca-exact")
    """
    return convert(open_source(Path(path)), attention, dtype=dtype, device=device, progress=progress)


def convert(
    source: Source,
    attention: AttentionArgument | None = "rope",
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> FarspanForCausalLM:
    """:func:`from_pretrained` on an opened source."""
    model = load(source, dtype=dtype, device=device, progress=progress)
    if attention is not None:
        for layer, spec in enumerate(target_specs(attention, model.config.attention_specs)):
            if spec != model.config.attention_specs[layer]:
                replace_attention(model, layer, spec)
    return model


def convert_folder(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    attention: AttentionArgument | None = None,
    *,
    to: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> None:
    """:func:`from_pretrained`, written to a new folder with the tokenizer; `to` writes another family's format."""
    check_out(Path(out))
    opened = open_source(Path(source))
    model = convert(opened, attention, dtype=dtype, device=device, progress=progress)
    save(model, Path(out), opened.carry, to=to)
