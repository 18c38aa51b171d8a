"""A model and its tokenizer from a farspan folder, or from any checkpoint that farspan.convert reads."""

import json
import os
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from farspan.data import TextTokenizer, documents, load_tokenizer
from farspan.errors import require
from farspan.models import FarspanForCausalLM


def is_ours(place: Path) -> bool:
    """Whether a path is the folder of a farspan model."""
    config = place / "config.json"
    return config.is_file() and json.loads(config.read_text(encoding="utf-8")).get("model_type") == "farspan"


def load_model(path: str | os.PathLike[str]) -> FarspanForCausalLM:
    """A farspan model as it is, or a LLaMA-family folder or GGUF file with its own rotary attention; in float32."""
    place = Path(path)
    require(place.exists(), f"MODEL must be a folder or a GGUF file, got {str(path)!r}, which does not exist")
    config = place / "config.json"
    model: FarspanForCausalLM
    if is_ours(place):
        model = FarspanForCausalLM.from_pretrained(place)
    else:
        require(
            config.is_file() or place.suffix == ".gguf" or any(place.glob("*.gguf")),
            f"MODEL must hold config.json or be a GGUF file, got {str(path)!r} with neither; check the path",
        )
        model = import_module("farspan.convert").from_pretrained(place, attention="rope")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.float().eval().to(device)


def load_texts(
    sources: list[str], tokenizer: TextTokenizer, *, train_length: int, text_tokens: int, texts: int
) -> list[Tensor]:
    """Documents of at least two windows, each cut to `text_tokens`, at most so many."""
    needed, found, longest = 2 * train_length, list[Tensor](), 0
    for source in sources:
        for document in documents(source):
            if len(found) == texts:
                return found
            ids = tokenizer.encode(document.text)[:text_tokens]
            longest = max(longest, len(ids))
            if len(ids) >= needed:
                found.append(torch.tensor(ids))
    require(
        bool(found),
        f"--text must hold a document of two windows = {needed} tokens, got {longest} at most in {', '.join(sources)}; "
        "use a longer text",
    )
    return found


def tokenizer_of(path: str | os.PathLike[str]) -> TextTokenizer:
    """The tokenizer beside a model, or inside its GGUF file."""
    place = Path(path)
    if (place / "tokenizer.json").is_file():
        return load_tokenizer(place)
    with TemporaryDirectory() as folder:
        import_module("farspan.convert.sources").open_source(place).carry(Path(folder))
        require(
            (Path(folder) / "tokenizer.json").is_file(),
            f"MODEL must come with tokenizer.json, got {str(path)!r} without; name one with --tokenizer",
        )
        return load_tokenizer(folder)
