"""Read checkpoints, safetensors folders and GGUF files: a configuration, names with shapes, one tensor at a time.

transformers' `from_pretrained` is not used here: it also follows adapters and pickles, and initialises what is missing.
Its GGUF reader drops tensors, head widths, windows and scaling methods that it does not know without an error. The
packages safetensors and gguf parse and unpack.
"""

import json
import math
import os
import re
import struct
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import logging as transformers_logging

from farspan.checkpoints.configuration import config_of, valid_config
from farspan.errors import require, unknown
from farspan.ops.rotary import Llama3, Rotary

if TYPE_CHECKING:
    from farspan.data import TextTokenizer

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
INDEX = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
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


class Source(ABC):
    """A checkpoint on disk. Its tensors have the names of our model."""

    path: Path
    config: dict[str, Any]
    """As in a config.json of transformers."""
    where: str = "config.json"
    """Where the configuration was read, for errors."""
    shapes: dict[str, tuple[int, ...]]
    """The shape of every tensor."""
    dtype: torch.dtype
    """The dtype of most tensors; float32 where they are packed."""
    generation: GenerationConfig | None = None
    """What generation_config.json says, where there is one."""

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Read one tensor, on the CPU."""

    @abstractmethod
    def carried(self) -> dict[str, bytes]:
        """Check and return the files that travel unchanged: the tokenizer and the settings of `generate`."""

    def carry(self, folder: Path) -> None:
        """Write the carried files to a folder."""
        for name, content in self.carried().items():
            (folder / name).write_bytes(content)


def open_source(path: Path) -> Source:
    """Open a folder with config.json and safetensors, or a .gguf file, or a folder with one."""
    # OWNER/NAME, where no such folder exists, is a model of the hub.
    of_hub = len(path.parts) == 2 and not (path.is_absolute() or path.suffix or path.parent.exists())
    require(
        path.exists(),
        f"checkpoint must be a folder or a .gguf file, got {str(path)!r}, which does not exist; "
        + (f"download it first: hf download {path} --local-dir {path.name}" if of_hub else "check the path"),
    )
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        if not found or (path / "config.json").exists():
            return Folder(path)
        require(
            len(found) == 1,
            f"checkpoint must hold one .gguf file, got {len(found)} in {str(path)!r}; name one of them",
        )
        path = found[0]
    _no_pickle(path)
    require(
        path.suffix == ".gguf",
        f"checkpoint must be a folder or a .gguf file, got {str(path)!r}; give the model's folder",
    )
    return GgufFile(path)


def _no_pickle(path: Path) -> None:
    require(
        path.suffix not in PICKLES,
        f"checkpoint must be safetensors or GGUF, got the pickle {str(path)!r}, which could run code when opened; "
        "save the model again with transformers' save_pretrained",
    )


class Folder(Source):
    """A transformers folder: config.json and safetensors, in one file or in shards."""

    def __init__(self, path: Path) -> None:
        self.path = path
        inner = path / "model"  # a training run keeps its model inside
        remedy = f"give {str(inner)!r}" if (inner / "config.json").is_file() else "give the folder of a model"
        require(
            (path / "config.json").is_file(),
            f"checkpoint must have a config.json, got {str(path)!r} without one; {remedy}",
        )
        self.config = read_json(path / "config.json")
        settings = path / "generation_config.json"
        self.generation = _generation(read_json(settings), path) if settings.is_file() else None
        self.shapes, self._where, kinds = {}, dict[str, Path](), Counter[str]()
        for file in self._files():
            with _open(file) as opened:
                for name in opened.keys():  # noqa: SIM118  (not a dict)
                    piece = opened.get_slice(name)
                    kind = piece.get_dtype()
                    require(
                        kind in DTYPES,
                        f"tensor {name!r} must hold floating-point numbers, got {kind}; "
                        "convert the unquantised checkpoint",
                    )
                    kinds[kind] += 1
                    self._where[name], self.shapes[name] = file, tuple(piece.get_shape())
        self.dtype = DTYPES[kinds.most_common(1)[0][0]] if kinds else torch.float32

    def _files(self) -> list[Path]:
        """Return the safetensors files: one, or the shards that the index names, which must lie beside it."""
        single, index = self.path / "model.safetensors", self.path / INDEX
        if single.is_file():
            return [single]
        if not index.is_file():
            for file in sorted(self.path.iterdir()):
                _no_pickle(file)
            raise ValueError(
                f"checkpoint must have model.safetensors or {INDEX}, got {str(self.path)!r} without either"
            )
        named = read_json(index).get("weight_map")
        require(
            isinstance(named, dict) and bool(named) and all(isinstance(shard, str) for shard in named.values()),
            f"weight_map of {str(index)!r} must name a file for each tensor; download it again",
        )
        shards = sorted({*dict(named or {}).values()})
        for shard in shards:
            require(
                Path(shard).name == shard,
                f"weight_map of {str(index)!r} must name files beside it, got {shard!r}; do not trust this folder",
            )
            require(
                (self.path / shard).is_file(),
                f"{INDEX} names the shard {shard!r}, which is missing from {str(self.path)!r}; download it again",
            )
        return [self.path / shard for shard in shards]

    def read(self, name: str) -> Tensor:
        # Opened for each tensor: what was read stays in memory for as long as its file is mapped.
        tensor: Tensor = _open(self._where[name]).get_tensor(name)
        return tensor

    def carried(self) -> dict[str, bytes]:
        check_tokenizer(self.path, config_of(self).vocab_size)
        files = [self.path / name for name in CARRIED if (self.path / name).is_file()]
        for file in files:
            if file.suffix == ".json":
                read_json(file)
        return {file.name: file.read_bytes() for file in files}


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{str(file)!r} is not a complete safetensors file ({error}); download or save it again"
        ) from error


def _generation(raw: dict[str, Any], path: Path) -> GenerationConfig:
    try:
        settings = GenerationConfig.from_dict(raw)
        for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
            held = getattr(settings, key)
            tokens = held if isinstance(held, list) else [held]
            require(
                held is None or all(type(token) is int and token >= 0 for token in tokens),
                f"{key} must be a token id or a list of them, got {held!r}",
            )
        for key in (key for key in raw if key.startswith("output_")):
            require(isinstance(raw[key], bool | None), f"{key} must be true or false, got {raw[key]!r}")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"generation_config.json of {str(path)!r} is not valid ({error}); correct or remove it"
        ) from error
    return settings


# GGUF

PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k": "self_attn.k_proj",
    "attn_k_norm": "self_attn.k_norm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
INTERLEAVED = {"llama": True, "qwen2": False, "qwen3": False, "smollm3": True}
"""Architecture → whether rows of q and k are stored pair by pair, (0, d/2, 1, d/2+1, …). Mistral calls itself llama."""
GGUF_CONFIG = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
}
GGUF_SCALING = ("type", "factor", "original_context_length", "finetuned")
BROKEN = (ValueError, KeyError, IndexError, OSError, OverflowError, TypeError, struct.error, MemoryError)
"""What gguf's reader raises on a file that is cut short or something else."""


class GgufFile(Source):
    """One .gguf file of a LLaMA-family model; packed weights are unpacked to float32."""

    where = "the GGUF metadata"
    dtype = torch.float32

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fields, tensors = _parse_gguf(path)
        self._kind = str(self._fields.get("general.architecture"))
        if self._kind not in INTERLEAVED:
            remedy = "checkpoints of other families cannot be converted"
            raise unknown(f"general.architecture of {str(path)!r}", self._kind, INTERLEAVED, remedy)
        self._tensors = {_our_name(tensor.name): tensor for tensor in tensors}
        self._divisors = self._tensors.pop("rope_freqs.weight", None)
        self.shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}
        for field in ("block_count", "embedding_length", "attention.head_count"):
            held = self._field(field)
            require(
                isinstance(held, int) and held >= 1,
                f"{str(path)!r} must give {self._kind}.{field} as a number of at least 1, got {held!r}; "
                "export the file again",
            )
        with valid_config({"model_type": self._kind}, self.where):
            self.config = self._config()

    def _field(self, name: str, default: Any = None) -> Any:
        return self._fields.get(f"{self._kind}.{name}", default)

    def _config(self) -> dict[str, Any]:
        config = {ours: self._field(name) for name, ours in GGUF_CONFIG.items() if self._field(name) is not None}
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
        width = config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        rotated, scale = self._field("rope.dimension_count", width), self._field("attention.scale", 0.0)
        require(
            rotated == width,
            f"{self._kind}.rope.dimension_count must be the head width {width}, got {rotated}; "
            "models that rotate only part of a head are not supported",
        )
        require(
            scale == 0 or math.isclose(scale, width**-0.5, rel_tol=1e-5),  # 0 stands for the default
            f"{self._kind}.attention.scale must be 1/√(head width) = {width**-0.5:.6g}, got {scale:.6g}; "
            "models that scale their scores otherwise are not supported",
        )
        if "model.embed_tokens.weight" in self.shapes:
            config["vocab_size"] = self.shapes["model.embed_tokens.weight"][0]
        for token, name in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
            config[f"{name}_token_id"] = self._fields.get(f"tokenizer.ggml.{token}_token_id")
        return {
            "model_type": "mistral" if config.get("sliding_window") and self._kind == "llama" else self._kind,
            **config,
            "tie_word_embeddings": "lm_head.weight" not in self.shapes,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self.shapes,
            "mlp_bias": "model.layers.0.mlp.up_proj.bias" in self.shapes,
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
        require(
            kind == "linear" and found.keys() <= {*GGUF_SCALING} and (factor == 1 or self._divisors is None),
            f"{prefix}* must be none or linear, and none beside 'rope_freqs.weight', got {found}; "
            "convert the safetensors folder instead",
        )
        rope = {"rope_theta": base, "rope_type": "default"}
        if self._divisors is not None:
            return rope | self._llama3(base, width)
        return rope if factor == 1 else rope | {"rope_type": "linear", "factor": factor}

    def _llama3(self, base: float, width: int) -> dict[str, Any]:
        """Return Llama 3.1's method. Its files hold only what divides each frequency: compare with the formula."""
        divisors = self._unpack("rope_freqs.weight", self._divisors).double().flatten()
        method = Llama3(round(float(divisors.max()), 3), 8192)
        expected = Rotary(width, base).frequencies() / Rotary(width, base, method).frequencies()
        require(
            divisors.shape == expected.shape and torch.allclose(divisors, expected, rtol=1e-4),
            "tensor 'rope_freqs.weight' must follow Llama 3.1's method (training length 8192, factors 1 and 4), got "
            "other values; convert the safetensors folder instead",
        )
        return {
            "rope_type": "llama3",
            "factor": method.factor,
            "original_max_position_embeddings": method.train_length,
            "low_freq_factor": method.low_rotations,
            "high_freq_factor": method.high_rotations,
        }

    def _unpack(self, name: str, tensor: Any) -> Tensor:
        import numpy as np
        from gguf.quants import dequantize

        try:
            with np.errstate(all="ignore"):  # damaged scales: :func:`load` raises for what is not finite
                unpacked = dequantize(tensor.data, tensor.tensor_type)
            return torch.from_numpy(unpacked.copy())
        except NotImplementedError as error:
            raise ValueError(
                f"tensor {name!r} in {str(self.path)!r} is packed as {tensor.tensor_type.name}, which gguf cannot "
                "unpack; convert another quantisation, or the safetensors folder"
            ) from error

    def read(self, name: str) -> Tensor:
        tensor = self._unpack(name, self._tensors[name]).reshape(self.shapes[name])
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
            load_auto_tokenizer(self.path.parent, gguf_file=self.path.name).save_pretrained(folder)
            check_tokenizer(Path(folder), config_of(self).vocab_size, self.path)
            return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def _parse_gguf(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """Return a GGUF file's fields (None for a list) and tensors."""
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
        return {n: None if n in lists else held.contents() for n, held in reader.fields.items()}, reader.tensors
    except BROKEN as error:
        raise ValueError(f"{str(path)!r} is not a complete GGUF file ({error}); download it again") from error


def _our_name(name: str) -> str:
    """Return our name of a GGUF tensor; unknown ones keep theirs.

    >>> _our_name("blk.3.attn_q.weight"), _our_name("output.weight"), _our_name("blk.0.odd.weight")
    ('model.layers.3.self_attn.q_proj.weight', 'lm_head.weight', 'blk.0.odd.weight')
    """
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if found is None or found[2] not in PARTS:
        return name
    layer = "" if found[1] is None else f"model.layers.{found[1]}."
    return f"{layer}{PARTS[found[2]]}.{found[3]}"


# Tokenizers


def tokenizer_of(source: Source) -> Any:
    """Return transformers' tokenizer of a source."""
    files = source.carried()
    require(
        any("token" in name or name == "vocab.json" for name in files),
        f"{str(source.path)!r} must come with its tokenizer, got none; add tokenizer.json",
    )
    with TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        return load_auto_tokenizer(Path(folder), source.path)


def text_tokenizer(path: str | os.PathLike[str]) -> "TextTokenizer":
    """Return the tokenizer beside a model, or inside its GGUF file, as farspan.data knows tokenizers."""
    from farspan.data import load_tokenizer

    folder = Path(path)
    if (folder / "tokenizer.json").is_file():
        has_model = (folder / "config.json").is_file()
        check_tokenizer(folder, config_of(open_source(folder)).vocab_size if has_model else None)
        return load_tokenizer(folder)
    with TemporaryDirectory() as carried:
        open_source(folder).carry(Path(carried))
        require(
            (Path(carried) / "tokenizer.json").is_file(),
            f"MODEL must come with tokenizer.json, got {str(path)!r} without; add it to the folder",
        )
        return load_tokenizer(carried)


def load_auto_tokenizer(folder: Path, named: Path | None = None, **options: Any) -> Any:
    """Call AutoTokenizer without remote code. Raise any failure inside as one line about `named`."""
    from transformers import AutoTokenizer

    try:
        with quiet():
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True, **options)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(
            f"the tokenizer of {str(named or folder)!r} cannot be read ({reason}); save or download it again"
        ) from error


def check_tokenizer(folder: Path, vocab_size: int | None = None, named: Path | None = None) -> None:
    """Raise for broken files of a tokenizer, by their names. A folder without any passes."""
    from tokenizers import Tokenizer

    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        for key, token in (read_json(folder / name) if (folder / name).is_file() else {}).items():
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
        vocab_size is None or tokens <= vocab_size,
        f"the tokenizer of {str(named or folder)!r} must have at most the model's vocab_size = {vocab_size} "
        f"tokens, got {tokens}; add the tokenizer that the model was trained with",
    )


def _not_finite(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or raise one line about the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=_not_finite)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is not JSON ({error}); download or save it again") from error
    require(isinstance(found, dict), f"{str(path)!r} must hold a JSON object, got {type(found).__name__}")
    return dict(found)


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
