"""Write a checkpoint as a folder that others load: with the model's source and a card, or as a family that needs none.

transformers finds a model's files by the lines `from .x import …` and looks for every x in the same folder. So each
module becomes one file of a flat folder, and each import of farspan a relative one. The Triton kernels are left out:
exported models take them from an installed farspan, and run on torch without it.
"""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from farspan.checkpoints.configuration import config_of, write_config
from farspan.checkpoints.convert import fingerprint, load, new_folder, read_note, save
from farspan.checkpoints.sources import Source, open_source, tokenizer_of
from farspan.configuration_farspan import FarspanConfig
from farspan.errors import require
from farspan.results import version
from farspan.utils import Progress, silent

ROOT = Path(__file__).parents[1]
ENTRY = "modeling_farspan"
AUTO_MAP = {
    "AutoConfig": f"{ENTRY}.FarspanConfig",
    "AutoModel": f"{ENTRY}.FarspanModel",
    "AutoModelForCausalLM": f"{ENTRY}.FarspanForCausalLM",
    "AutoModelForMaskedLM": f"{ENTRY}.FarspanForMaskedLM",
    "AutoModelForSequenceClassification": f"{ENTRY}.FarspanForSequenceClassification",
}
"""What config.json tells the Auto classes. All through one file: transformers keeps a copy of the source for each file
that the map names, and a class is not the same in two copies."""
ALWAYS_THERE = {"torch", "transformers", "huggingface_hub", *sys.stdlib_module_names}


def export_folder(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    name: str | None = None,
    results: Sequence[str | os.PathLike[str]] = (),
    license: str | None = None,
    base_model: str | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress = silent,
) -> None:
    """Write safetensors, tokenizer, settings of `generate`, the model's source and a README.md to a new folder.

    transformers loads it with ``trust_remote_code=True`` where farspan is not installed, and without it after
    ``import farspan``.

    Args:
        source: a farspan folder, or anything :func:`farspan.convert.from_pretrained` reads, with its tokenizer.
        name: what the card calls the model, for example "owner/name"; by default the folder's name.
        results: JSON files of `farspan eval ppl`, `passkey` or `retrieval` about this model, for the card's tables.
        license: for example "apache-2.0".
        base_model: the model that this one was made from, by its name on the hub; by default what the source's
            conversion.json names, or the source itself where it is no farspan folder.
        dtype: of the weights; None keeps the source's.

    ::

        farspan.checkpoints.export_folder("runs/mine/model", "hub/mine", results=["ppl.json", "passkey.json"])
    """
    from farspan.checkpoints.card import render
    from farspan.report.results import collect_files

    out = Path(out)
    with new_folder(out):
        name = name or out.resolve().name
        run = collect_files([Path(path) for path in results], name)
        opened = open_source(Path(source))
        tokenizer_of(opened)  # raises before any work is done
        named = [result for result in run.sources if result.model_fingerprint is not None]  # the card says if not
        own = fingerprint(opened) if named else None
        for result in named:
            require(
                result.model_fingerprint == own,
                f"results must be about {str(opened.path)!r}, got {result.file!r} of another model ({result.command}); "
                "measure this one with farspan eval, or leave the file out",
            )
        model = load(opened, dtype=dtype, progress=progress)
        model.config.auto_map = dict(AUTO_MAP)
        original = base_model or _original(opened)
        base_model = original if original and "/" in original else base_model
        card = render(name, model, run, license=license, base_model=base_model, original=original)

        def carry(folder: Path) -> None:
            opened.carry(folder)
            for file, text in {**flat_source(), "README.md": card}.items():
                (folder / file).write_text(text, encoding="utf-8")

        save(model, out, carry)


def export_as(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    family: str = "smollm3",
    *,
    dtype: torch.dtype | None = None,
    progress: Progress = silent,
) -> list[str]:
    """Write a rope or hybrid-rope model as a plain folder of another family, which needs no farspan and no custom code.

    The logits are the same, except for what is returned: one sentence for each thing that the family does not have.
    Raise for a model that does not map.
    """
    with new_folder(Path(out)):
        opened = open_source(Path(source))
        config = config_of(opened)
        raw = write_config(config, family)
        opened.carried()  # raises for a broken tokenizer, before any work
        save(load(opened, dtype=dtype, progress=progress), Path(out), opened.carry, config=raw)
    lost = (
        f"log_length is lost: past {config.train_length:,} tokens the scores of global layers no longer grow with the "
        "logarithm of the length, and logits differ"
    )
    return [lost] if config.log_length else []


def _original(source: Source) -> str | None:
    """Return the name of what a source was converted from, or is converted from now.

    That is "owner/name" for a folder in the hub's cache, and elsewhere the name of the file or folder.
    """
    found = read_note(source.path) if source.path.is_dir() else None
    if found is None and source.config.get("model_type") == FarspanConfig.model_type:
        return None
    found = found or source.path.absolute()
    cached = next((part for part in found.parts if part.startswith("models--")), None)
    return cached.removeprefix("models--").replace("--", "/", 1) if cached else found.name


def flat_source() -> dict[str, str]:
    """Return file name → text for every module that a model needs.

    >>> files = flat_source()
    >>> "from .farspan_ops_rotary import Rotary" in files["modeling_farspan.py"], len(files)
    (True, 16)
    """
    texts: dict[str, str] = {}
    waiting = [f"farspan.{ENTRY}"]
    while waiting:
        module = waiting.pop()
        if flat_name(module) not in texts:
            path = ROOT.joinpath(*module.split(".")[1:])
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            texts[flat_name(module)], needed = rewrite(path.read_text(encoding="utf-8"))
            waiting += needed
    # The configuration is loaded through the entry, too: a model that is saved again must name it.
    texts[ENTRY] += "\nFarspanConfig.__module__ = __name__\n"
    origin = f"# farspan {version('farspan')}, Apache-2.0; written by `farspan export`.\n"
    return {f"{name}.py": origin + text for name, text in sorted(texts.items())}


def flat_name(module: str) -> str:
    """Return the file of a module without its ending.

    >>> flat_name("farspan.ops.rotary"), flat_name("farspan.modeling_farspan")
    ('farspan_ops_rotary', 'modeling_farspan')
    """
    return module.removeprefix("farspan.") if module.endswith("_farspan") else module.replace(".", "_")


IMPORT = re.compile(r"^( *)((?:from ([\w.]+) )?import (\([^)]*\)|[\w., ]*\w))(.*)", re.MULTILINE)
"""An import that begins a line: indent, statement, the module of a `from`, what it imports, the rest of the line."""


def rewrite(text: str) -> tuple[str, list[str]]:
    """Return a module's text with flat imports, and the modules of farspan that it imports.

    >>> print(rewrite("from farspan.ops import Rotary  # angles")[0])
    from .farspan_ops import Rotary  # angles
    """
    needed = list[str]()

    def flat(found: re.Match[str]) -> str:
        indent, statement, module, names, rest = found.groups()
        if module == "farspan":  # `from farspan import modeling_farspan`
            needed.append(f"farspan.{names}")
            return f"{indent}from . import {flat_name(needed[-1])}{rest}"
        module = module or names.split()[0]
        if module.startswith("farspan.") and not module.startswith("farspan.ops.triton"):
            needed.append(module)
            return f"{indent}from .{flat_name(module)} import {names}{rest}"
        if module.partition(".")[0] in ALWAYS_THERE:
            return found[0]
        # transformers rejects a model whose other imports are missing, used or not, unless they may fail.
        return f"{indent}try:\n{indent}    {statement}\n{indent}except ImportError:\n{indent}    raise{rest}"

    return IMPORT.sub(flat, text), needed
