"""Checkpoints as they lie on disk: a configuration, names with shapes, and one tensor at a time.

Only formats that hold numbers and nothing else are read. A pickle can run code when it is opened, so it is refused.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from farspan.convert.families import WEIGHTS
from farspan.errors import require

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
INDEX = "model.safetensors.index.json"
CARRIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
"""Tokenizer and generation settings travel with a model unchanged."""


@dataclass(frozen=True)
class Place:
    """Where a configuration stands, so that an error can name what its reader will find there.

    >>> Place().called("head_dim")
    "config.json's head_dim"
    >>> Place("the GGUF metadata", {"head_dim": "llama.attention.key_length"}).called("head_dim")
    "the GGUF metadata's llama.attention.key_length"
    """

    name: str = "config.json"
    fields: Mapping[str, str] = field(default_factory=dict)
    """transformers' name of a field → the name there, where it is another."""

    def called(self, name: str) -> str:
        """What an error calls the field that transformers calls `name`."""
        return f"{self.name}'s {self.fields.get(name, name)}"


class Source(ABC):
    """A checkpoint on disk."""

    path: Path
    config: dict[str, Any]
    """As in a config.json of transformers."""
    place: Place = Place()
    """Where that configuration was read."""
    weights: Mapping[str, str]
    """The weight map: this source's names → our names."""
    shapes: dict[str, tuple[int, ...]]
    """Every tensor's shape, by its name here."""
    dtype: torch.dtype
    """What the tensors are stored in; float32 where they are packed."""
    generation: dict[str, Any] | None = None
    """As in generation_config.json, where there is one."""

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU."""

    @abstractmethod
    def carry(self, folder: Path) -> None:
        """Leave what travels unchanged in a folder: the tokenizer and the settings of `generate`."""


def open_source(path: Path) -> Source:
    """The source at a path: a folder with config.json and safetensors, or a .gguf file."""
    require(
        path.exists(),
        f"checkpoint must be a folder or a .gguf file, got {str(path)!r}, which does not exist; {_where_from(path)}",
    )
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        if found and not (path / "config.json").exists():
            require(
                len(found) == 1,
                f"checkpoint must hold one .gguf file, got {len(found)} in {str(path)!r}; name one of them",
            )
            path = found[0]
        else:
            return Folder(path)
    require(
        path.suffix not in PICKLES,
        f"checkpoint must be safetensors or GGUF, got the pickle {str(path)!r}, which could run code when opened; "
        "save the model again with transformers' save_pretrained",
    )
    require(
        path.suffix == ".gguf",
        f"checkpoint must be a folder or a .gguf file, got {str(path)!r}; give the model's folder",
    )
    from farspan.convert.gguf_file import GgufFile

    return GgufFile(path)


def _where_from(path: Path) -> str:
    """What to do about a path that does not exist: it may be the name of a model on the hub."""
    if len(path.parts) == 2 and not path.is_absolute() and not path.suffix and not path.parent.exists():
        return f"a model of the Hugging Face hub must be downloaded first: hf download {path} --local-dir {path.name}"
    return "check the path"


def _nearby(path: Path) -> str:
    """Where the model may be that a folder without one is taken for: a run keeps its own inside."""
    if (path / "model" / "config.json").is_file():
        return f"give {str(path / 'model')!r}, the model of that run"
    return "give the folder of a model"


class Folder(Source):
    """A transformers folder: config.json and safetensors, in one file or in shards."""

    weights = WEIGHTS

    def __init__(self, path: Path) -> None:
        self.path = path
        require(
            (path / "config.json").is_file(),
            f"checkpoint must have a config.json, got {str(path)!r} without one; {_nearby(path)}",
        )
        self.config = _json(path / "config.json")
        settings = path / "generation_config.json"
        self.generation = _json(settings) if settings.is_file() else None
        index = self._index()
        files = {file: self._open(file) for file in sorted({*index.values()}) or [self._only_file()]}
        held = {file: set(opened.keys()) for file, opened in files.items()}
        for name, file in index.items():
            require(
                name in held[file],
                f"tensor {name!r} is missing from {str(path / file)!r}, where {INDEX} says it is; download both again",
            )
        self._where = index or {name: file for file, names in held.items() for name in names}
        slices = {name: files[file].get_slice(name) for name, file in self._where.items()}
        self.shapes = {name: tuple(piece.get_shape()) for name, piece in slices.items()}
        kinds = [getattr(torch, DTYPES[piece.get_dtype()]) for piece in slices.values() if piece.get_dtype() in DTYPES]
        self.dtype = max(kinds, key=kinds.count) if kinds else torch.float32
        for name, piece in slices.items():
            require(
                piece.get_dtype() in DTYPES,
                f"tensor {name!r} must hold floating-point numbers, got {piece.get_dtype()}; "
                "convert the unquantised checkpoint",
            )

    def _index(self) -> dict[str, str]:
        """Tensor → shard; empty where there is one file."""
        if not (self.path / INDEX).is_file():
            return {}
        found = _json(self.path / INDEX)
        if "weight_map" not in found and (self.path / "model.safetensors").is_file():
            return {}
        require(
            "weight_map" in found, f"{str(self.path / INDEX)!r} must have a weight_map, got none; download it again"
        )
        index = found["weight_map"]
        require(
            isinstance(index, dict) and all(isinstance(file, str) for file in index.values()),
            f"weight_map of {str(self.path / INDEX)!r} must name a file for each tensor, got another kind; "
            "download it again",
        )
        for file in sorted({*index.values()}):
            require(
                (self.path / file).is_file(),
                f"{INDEX} names the shard {file!r}, which is missing from {str(self.path)!r}; download it again",
            )
        return dict(index)

    def _only_file(self) -> str:
        if (self.path / "model.safetensors").is_file():
            return "model.safetensors"
        pickles = sorted(file.name for file in self.path.iterdir() if file.suffix in PICKLES)
        require(
            not pickles,
            f"checkpoint must have safetensors, got only {', '.join(pickles[:1])!r} in {str(self.path)!r}, a pickle "
            "that could run code when opened; save the model again with transformers' save_pretrained",
        )
        raise ValueError(f"checkpoint must have model.safetensors or {INDEX}, got {str(self.path)!r} without either")

    def _open(self, file: str) -> Any:
        try:
            return safe_open(self.path / file, framework="pt")
        except SafetensorError as error:
            raise ValueError(
                f"{str(self.path / file)!r} is not a whole safetensors file ({error}); download or save it again"
            ) from error

    def read(self, name: str) -> Tensor:
        # Opened for each tensor: what was read stays resident for as long as its file is mapped.
        tensor: Tensor = self._open(self._where[name]).get_tensor(name)
        return tensor

    def carry(self, folder: Path) -> None:
        check_tokenizer(self.path)
        for name in CARRIED:
            if (self.path / name).is_file():
                (folder / name).write_bytes((self.path / name).read_bytes())


def check_tokenizer(folder: Path) -> None:
    """Refuse broken files of a tokenizer by their names; none at all is nobody's fault."""
    from tokenizers import Tokenizer

    for name in CARRIED:
        if name.endswith(".json") and (folder / name).is_file():
            _json(folder / name)
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{str(file)!r} is not a tokenizer ({error}); download or save it again") from error


DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} is not JSON ({error}); download or save it again") from error
    require(isinstance(found, dict), f"{str(path)!r} must hold a JSON object, got {type(found).__name__}")
    return dict(found)
