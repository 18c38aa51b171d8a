"""A model from any checkpoint that farspan.convert reads, and texts long enough for it."""

import json
import os
from pathlib import Path

import torch
from torch import Tensor

from farspan.convert import from_pretrained
from farspan.data import TextTokenizer, documents
from farspan.errors import require
from farspan.modeling_farspan import FarspanForCausalLM


def is_ours(place: Path) -> bool:
    """Whether a path is the folder of a farspan model."""
    config = place / "config.json"
    return config.is_file() and json.loads(config.read_text(encoding="utf-8")).get("model_type") == "farspan"


def load_model(path: str | os.PathLike[str]) -> FarspanForCausalLM:
    """A farspan model as it is, or a LLaMA-family folder or GGUF file with its own rotary attention; in float32."""
    place = Path(path)
    require(place.exists(), f"MODEL must be a folder or a GGUF file, got {str(path)!r}, which does not exist")
    model = from_pretrained(place, attention=None)
    require(
        not model.config.log_length,
        f"MODEL must be without log_length to be looked at, got {str(path)!r} with it: the factors of its scores are "
        "those of plain ones; set it to false in its config.json",
    )
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
        f"text must hold a document of two windows = {needed} tokens, got {longest} at most in {', '.join(sources)}; "
        + ("raise text_tokens" if longest == text_tokens else "use a longer text"),
    )
    return found
