"""From a checkpoint on disk to a folder that can be uploaded as it is."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from farspan.configuration_farspan import FarspanConfig
from farspan.convert.configuration import config_of
from farspan.convert.fingerprint import fingerprint
from farspan.convert.folder import clear_out, save
from farspan.convert.load import Progress, load
from farspan.convert.note import read_note
from farspan.convert.sources import Source, open_source
from farspan.convert.text import tokenizer_of
from farspan.errors import require
from farspan.export.card import Card, render
from farspan.export.source import AUTO_MAP, flat_source
from farspan.report.collect import Run, collect_files

GENERATION = "generation_config.json"


def export_folder(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    name: str | None = None,
    results: Sequence[str | os.PathLike[str]] = (),
    license: str | None = None,
    base_model: str | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> None:
    """Write safetensors, tokenizer, settings of `generate`, the model's source and a README.md to a new folder.

    transformers loads it with ``trust_remote_code=True`` where farspan is not installed, and without it after
    ``import farspan``.

    Args:
        source: a farspan folder, or anything :func:`farspan.convert.from_pretrained` reads, with its tokenizer.
        name: what the card calls the model, for example "owner/name"; by default the folder's name.
        results: JSON files of `farspan eval` (ppl, passkey, pairs, bits) about this model, for the card's tables;
            those that say that they are of another are refused.
        license: for example "apache-2.0".
        base_model: the model that this one was made from, by its name on the hub; by default what the source's
            conversion.json names, or the source itself where it is no farspan folder.
        dtype: of the weights; None keeps the source's.

    ::

        farspan.export.export_folder("runs/mine/model", "hub/mine", results=["ppl.json", "passkey.json"])
    """
    out = Path(out)
    clear_out(out)
    name = name or out.resolve().name
    run = collect_files([Path(path) for path in results], name)
    opened = open_source(Path(source))
    _check_tokenizer(opened)  # before any work is done
    _refuse_results_of_another(run, opened)
    model = load(opened, dtype=dtype, progress=progress)
    model.config.auto_map = dict(AUTO_MAP)
    original = base_model or _original(opened)
    on_hub = base_model or (original if original and "/" in original else None)
    card = render(Card(name, model, run, license, on_hub, original, rounded=model.dtype != opened.dtype))

    def beside(folder: Path) -> None:
        opened.carry(folder)
        if not (folder / GENERATION).is_file():
            model.generation_config.save_pretrained(folder)
        kinds = {spec.kind for spec in model.config.attention_specs}
        for file, text in {**flat_source(kinds), "README.md": card}.items():
            (folder / file).write_text(text, encoding="utf-8")

    save(model, out, beside)


def _check_tokenizer(source: Source) -> None:
    """Refuse a source without a tokenizer, and one whose tokens the model has no embedding for."""
    tokens, size = max(tokenizer_of(source).get_vocab().values()) + 1, config_of(source).vocab_size
    require(
        tokens <= size,
        f"the tokenizer of {str(source.path)!r} must have at most the model's vocab_size = {size} tokens, got {tokens}"
        "; put the one beside the model that it was trained with",
    )


def _refuse_results_of_another(run: Run, source: Source) -> None:
    """Results that do not say of which model they are pass; the card says so."""
    told = [result for result in run.sources if result.model is not None]
    own = fingerprint(source) if told else None
    for result in told:
        require(
            result.model == own,
            f"results must be about {str(source.path)!r}, got {result.file!r} of another model "
            f"({result.command}); measure this one with farspan eval, or leave the file out",
        )


def _original(source: Source) -> str | None:
    """What a source was converted from, or is converted from now, by name."""
    found = read_note(source.path) if source.path.is_dir() else None
    if found is None and source.config.get("model_type") != FarspanConfig.model_type:
        found = source.path.absolute()
    return None if found is None else original_name(found)


def original_name(path: Path) -> str:
    """What to call a checkpoint at a path: "owner/name" in the hub's cache, elsewhere its file or folder.

    >>> original_name(Path("hub/models--owner--some-model/snapshots/0a1b")), original_name(Path("in/smol.gguf"))
    ('owner/some-model', 'smol.gguf')
    """
    cached = next((part for part in path.parts if part.startswith("models--")), None)
    return cached.removeprefix("models--").replace("--", "/", 1) if cached else path.name
