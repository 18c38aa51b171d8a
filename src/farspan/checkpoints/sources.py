"""Read checkpoints, safetensors folders and GGUF files: a configuration, names with shapes, one tensor at a time.

The packages safetensors and gguf parse and unpack. transformers' `from_pretrained` is not used: it follows adapters and
pickles, and initialises what is missing. Its GGUF reader drops head widths, windows and scaling methods that it does
not know without an error, has no SmolLM3, and holds all tensors at once.
"""

import math
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from farspan.checkpoints.configuration import config_of, valid_config
from farspan.errors import require, require_choice
from farspan.ops.rotary import Llama3, Rotary
from farspan.utils import read_settings

if TYPE_CHECKING:
    from farspan.data import TextTokenizer

INDEX = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TOKENIZERS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "merges.txt"),
)
CARRIED = (*TOKENIZERS, "chat_template.jinja", "generation_config.json")
"""Files that travel with a model unchanged."""


class Source(ABC):
    """A checkpoint on disk."""

    path: Path
    config: dict[str, Any]
    """As in a config.json of transformers."""
    where: str
    """Where the configuration was read, for errors."""
    shapes: dict[str, tuple[int, ...]]
    """The shape of every tensor, by its name in the file."""
    dtype: torch.dtype
    """The dtype of most tensors; float32 where they are packed."""
    generation: GenerationConfig | None = None
    """What generation_config.json says, where there is one."""

    @abstractmethod
    def stored(self, name: str) -> str:
        """Return the name that a tensor of our model has in the file."""

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Read the tensor of that name in our model, on the CPU."""

    @abstractmethod
    def carried(self) -> dict[str, bytes]:
        """Return the files that travel unchanged: the tokenizer and the settings of `generate`."""

    def carry(self, folder: Path) -> None:
        """Write the carried files to a folder."""
        for name, content in self.carried().items():
            (folder / name).write_bytes(content)


def open_source(path: Path) -> Source:
    """Open a folder with config.json and safetensors, or a .gguf file, or a folder with one."""
    # OWNER/NAME, where no such folder exists, is a model of the hub.
    of_hub = len(path.parts) == 2 and not (path.is_absolute() or path.suffix or path.parent.exists())
    remedy = f"download it first: hf download {path} --local-dir {path.name}" if of_hub else "check the path"
    require(
        path.exists(), f"checkpoint must be a folder or a .gguf file, got {str(path)!r}, which does not exist; {remedy}"
    )
    found = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    if path.is_dir() and (not found or (path / "config.json").exists()):
        return Folder(path)
    require(
        len(found) == 1 and found[0].suffix == ".gguf",
        f"checkpoint must be a folder or one .gguf file, got {', '.join(map(str, found))}; pickles are never opened",
    )
    return GgufFile(found[0])


class Folder(Source):
    """A transformers folder: config.json and safetensors, in one file or in shards."""

    where = "config.json"

    def __init__(self, path: Path) -> None:
        self.path = path
        inner = path / "model"  # a training run keeps its model inside
        remedy = f"give {str(inner)!r}" if (inner / "config.json").is_file() else "give the folder of a model"
        require(
            (path / "config.json").is_file(),
            f"checkpoint must have a config.json, got {str(path)!r} without one; {remedy}",
        )
        self.config = read_settings(path / "config.json", "checkpoint")
        settings = path / "generation_config.json"
        self.generation = _generation(settings) if settings.is_file() else None
        self.shapes, self._files, kinds = {}, dict[str, Path](), Counter[str]()
        for file in self._safetensors():
            with _open(file) as opened:
                for name in opened.keys():  # noqa: SIM118  (not a dict)
                    piece = opened.get_slice(name)
                    kind = piece.get_dtype()
                    need = f"tensor {name!r} must hold floating-point numbers, got {kind}; convert unquantised weights"
                    require(kind in DTYPES, need)
                    kinds[kind] += 1
                    self._files[name], self.shapes[name] = file, tuple(piece.get_shape())
        self.dtype = DTYPES[kinds.most_common(1)[0][0]] if kinds else torch.float32

    def _safetensors(self) -> list[Path]:
        """Return the file, or the shards that the index names, which must lie beside it."""
        single, index = self.path / "model.safetensors", self.path / INDEX
        if single.is_file():
            return [single]
        require(
            index.is_file(),
            f"checkpoint must have model.safetensors or {INDEX}, got {str(self.path)!r} without either; a pickle "
            "(pytorch_model.bin) could run code when opened: save the model again with transformers' save_pretrained",
        )
        named = read_settings(index, "checkpoint").get("weight_map")
        names = sorted(set(map(str, named.values()))) if isinstance(named, dict) else []
        wrong = next((n for n in names if Path(n).name != n or not (self.path / n).is_file()), None)
        require(
            bool(names) and wrong is None,
            f"weight_map of {str(index)!r} must name files beside it, got {repr(wrong) if names else 'none'}; "
            "download all files, and do not trust a folder that names others",
        )
        return [self.path / name for name in names]

    def stored(self, name: str) -> str:
        return name

    def read(self, name: str) -> Tensor:
        # Opened for each tensor: what was read stays in memory for as long as its file is mapped.
        tensor: Tensor = _open(self._files[name]).get_tensor(name)
        return tensor

    def carried(self) -> dict[str, bytes]:
        check_tokenizer(self.path, config_of(self).vocab_size)
        files = [self.path / name for name in CARRIED if (self.path / name).is_file()]
        for file in files:
            if file.suffix == ".json":
                read_settings(file, "checkpoint")  # raises for a broken one
        return {file.name: file.read_bytes() for file in files}


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{str(file)!r} is not a complete safetensors file ({error}); download or save it again"
        ) from error


def _generation(file: Path) -> GenerationConfig:
    raw = read_settings(file, "checkpoint")
    try:
        settings = GenerationConfig.from_dict(raw)
        for key, value in settings.to_dict().items():
            if key in ("eos_token_id", "bos_token_id", "pad_token_id"):
                tokens = value if isinstance(value, list) else [value]
                good = value is None or all(type(token) is int and token >= 0 for token in tokens)
                require(good, f"{key} must be a token id or a list of them, got {value!r}")
            elif key.startswith("output_"):
                require(isinstance(value, bool | None), f"{key} must be true or false, got {value!r}")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(file)!r} is not valid ({error}); correct or remove it") from error
    return settings


# GGUF

INTERLEAVED = {"llama": True, "qwen2": False, "qwen3": False, "smollm3": True}
"""Architecture → whether rows of q and k are stored pair by pair, (0, d/2, 1, d/2+1, …). Mistral calls itself llama."""
GGUF_CONFIG = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
}


class GgufFile(Source):
    """One .gguf file of a LLaMA-family model; packed weights are unpacked to float32."""

    where, dtype = "the GGUF metadata", torch.float32

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fields, self._tensors = _parse_gguf(path)
        self._kind = str(self._fields.get("general.architecture"))
        remedy = "checkpoints of other families cannot be converted"
        require_choice(f"general.architecture of {str(path)!r}", self._kind, INTERLEAVED, remedy)
        self._divisors = self._tensors.pop("rope_freqs.weight", None)
        self.shapes = {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in self._tensors.items()}
        for field in ("block_count", "embedding_length", "attention.head_count"):
            held = self._field(field)
            need = f"{str(path)!r} must give {self._kind}.{field} as a number from 1 on, got {held!r}; export it again"
            require(isinstance(held, int) and held >= 1, need)
        with valid_config({"model_type": self._kind}, self.where):
            self.config = self._config()

    def _field(self, name: str, default: Any = None) -> Any:
        return self._fields.get(f"{self._kind}.{name}", default)

    def _config(self) -> dict[str, Any]:
        found = {ours: self._field(name) for ours, name in GGUF_CONFIG.items()}
        config = {ours: value for ours, value in found.items() if value is not None}
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
        width = config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        rotated, scale = self._field("rope.dimension_count", width), self._field("attention.scale")
        require(
            rotated == width and (not scale or math.isclose(scale, width**-0.5, rel_tol=1e-5)),
            f"heads of width {width} must be rotated whole and have the attention.scale {width**-0.5:.6g}, "
            f"got {rotated} and {scale or 'the default'}; such models are not supported",
        )
        if "token_embd.weight" in self.shapes:
            config["vocab_size"] = self.shapes["token_embd.weight"][0]
        for ours, token in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
            config[f"{ours}_token_id"] = self._fields.get(f"tokenizer.ggml.{token}_token_id")
        return {
            "model_type": "mistral" if config.get("sliding_window") and self._kind == "llama" else self._kind,
            **config,
            "tie_word_embeddings": "output.weight" not in self.shapes,
            "attention_bias": "blk.0.attn_q.bias" in self.shapes,
            "mlp_bias": "blk.0.ffn_up.bias" in self.shapes,
            "rope_parameters": self._rope(width),
        }

    def _rope(self, width: int) -> dict[str, Any]:
        """Return `rope_parameters`: no, linear or Llama 3 scaling."""
        prefix = f"{self._kind}.rope.scaling."
        found = {n.removeprefix(prefix): value for n, value in self._fields.items() if n.startswith(prefix)}
        base, kind = self._field("rope.freq_base", 10_000.0), found.get("type", "linear")
        factor = found.get("factor") or self._field("rope.scale_linear") or 1.0
        if kind == "none" or (kind == "yarn" and factor == 1):
            kind, factor = "linear", 1.0
        known = {"type", "factor", "original_context_length", "finetuned"}
        require(
            kind == "linear" and found.keys() <= known and (factor == 1 or self._divisors is None),
            f"{prefix}* must be none or linear, and none beside 'rope_freqs.weight', got {found}; "
            "convert the safetensors folder instead",
        )
        rope = {"rope_theta": base, "rope_type": "default"}
        if self._divisors is None:
            return rope if factor == 1 else rope | {"rope_type": "linear", "factor": factor}
        # Llama 3.1's files hold only what divides each frequency: compare with the formula.
        divisors = self._unpack(self._divisors).double().flatten()
        method = Llama3(round(float(divisors.max()), 3), 8192)
        expected = Rotary(width, base).frequencies() / Rotary(width, base, method).frequencies()
        require(
            divisors.shape == expected.shape and torch.allclose(divisors, expected, rtol=1e-4),
            "tensor 'rope_freqs.weight' must follow Llama 3.1's method (training length 8192, factors 1 and 4), got "
            "other values; convert the safetensors folder instead",
        )
        return rope | {
            "rope_type": "llama3",
            "factor": method.factor,
            "original_max_position_embeddings": method.train_length,
            "low_freq_factor": method.low_rotations,
            "high_freq_factor": method.high_rotations,
        }

    def _unpack(self, tensor: Any) -> Tensor:
        import numpy as np
        from gguf.quants import dequantize

        try:
            with np.errstate(all="ignore"):  # damaged scales: `load` raises for what is not finite
                return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        except NotImplementedError as error:
            raise ValueError(
                f"tensor {tensor.name!r} in {str(self.path)!r} is packed as {tensor.tensor_type.name}, which gguf "
                "cannot unpack; convert another quantisation, or the safetensors folder"
            ) from error

    @cached_property
    def _names(self) -> Any:
        import gguf

        return gguf.get_tensor_name_map(gguf.MODEL_ARCH[self._kind.upper()], self.config["num_hidden_layers"])

    def stored(self, name: str) -> str:
        return self._names.get_name(name, try_suffixes=(".weight", ".bias")) or name

    def read(self, name: str) -> Tensor:
        stored = self.stored(name)
        tensor = self._unpack(self._tensors[stored]).reshape(self.shapes[stored])
        if INTERLEAVED[self._kind] and re.search(r"\.[qk]_proj\.", name):
            pairs = tensor.unflatten(0, (-1, self.config["head_dim"] // 2, 2))  # head, pair, member
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
        return tensor

    def carried(self) -> dict[str, bytes]:
        require(
            "tokenizer.ggml.tokens" in self._fields,
            f"{str(self.path)!r} must hold its tokenizer (the field tokenizer.ggml.tokens), got none; "
            "export the file again with its vocabulary",
        )
        with TemporaryDirectory() as folder:
            _auto_tokenizer(self.path.parent, self.path, gguf_file=self.path.name).save_pretrained(folder)
            check_tokenizer(Path(folder), config_of(self).vocab_size, self.path)
            return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def _parse_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a GGUF file's fields (None for a list) and tensors, by name."""
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError as error:
        raise ValueError(f"a .gguf checkpoint needs the package {error.name}; pip install 'farspan[gguf]'") from error

    class Reader(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            found = super()._get(offset, dtype, count, override_order)
            require(len(found) == count, f"it ends before byte {offset}")  # else a damaged length is a loop without end
            return found

    try:
        reader = Reader(path)
        lists = {name for name, held in reader.fields.items() if held.types and held.types[0].name == "ARRAY"}
        fields = {name: None if name in lists else held.contents() for name, held in reader.fields.items()}
    except Exception as error:  # whatever numpy and struct raise for a file that is cut short or something else
        raise ValueError(f"{str(path)!r} is not a complete GGUF file ({error}); download it again") from error
    return fields, {tensor.name: tensor for tensor in reader.tensors}


# Tokenizers


def tokenizer_of(source: Source) -> Any:
    """Return transformers' tokenizer of a source."""
    with TemporaryDirectory() as folder:
        source.carry(Path(folder))
        require(
            any((Path(folder) / name).is_file() for name in TOKENIZERS),
            f"{str(source.path)!r} must come with its tokenizer, got none; add tokenizer.json",
        )
        return _auto_tokenizer(Path(folder), source.path)


def _auto_tokenizer(folder: Path, named: Path, **options: Any) -> Any:
    """Open a folder's tokenizer without remote code. Raise any failure inside as one line about `named`."""
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True, **options)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(
            f"the tokenizer of {str(named)!r} cannot be read ({reason}); save or download it again"
        ) from error


def text_tokenizer(path: str | os.PathLike[str]) -> "TextTokenizer":
    """Return the tokenizer beside a model, or inside its GGUF file, as farspan.data knows tokenizers."""
    from farspan.data import load_tokenizer

    source = open_source(Path(path))
    with TemporaryDirectory() as folder:
        source.carry(Path(folder))
        require(
            (Path(folder) / "tokenizer.json").is_file(),
            f"MODEL must come with tokenizer.json, got {str(path)!r} without; add it to the folder",
        )
        return load_tokenizer(source.path if isinstance(source, Folder) else folder)  # errors name the model's folder


def check_tokenizer(folder: Path, vocab_size: int, named: Path | None = None) -> None:
    """Raise for broken files of a tokenizer, and more tokens than the model has. A folder without any passes."""
    from tokenizers import Tokenizer

    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        for key, token in (read_settings(folder / name, "checkpoint") if (folder / name).is_file() else {}).items():
            text = token.get("content") if isinstance(token, dict) else token
            require(
                not re.fullmatch("(bos|eos|pad|unk)_token", key) or text is None or isinstance(text, str),
                f"{key} in {str(folder / name)!r} must be text, got {token!r}; correct it",
            )
    file = folder / "tokenizer.json"
    if not file.is_file():
        return
    try:
        vocabulary = Tokenizer.from_file(str(file)).get_vocab()
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{str(file)!r} is not a tokenizer ({error}); download or save it again") from error
    tokens = max(vocabulary.values(), default=-1) + 1
    require(
        tokens <= vocab_size,
        f"the tokenizer of {str(named or folder)!r} must have at most the model's vocab_size = {vocab_size} tokens, "
        f"got {tokens}; add the tokenizer that the model was trained with",
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Show none of transformers' progress bars and warnings inside the block."""
    bars, level = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
