"""GGUF files, read tensor by tensor with the `gguf` package; packed weights are unpacked to float32."""

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farspan.convert.configuration import check_rope, check_sizes, sound_config
from farspan.convert.families import (
    GGUF_ARCHITECTURES,
    GGUF_CONFIG,
    GGUF_NEEDED,
    GGUF_ROPE,
    GGUF_SCALING,
    GGUF_WEIGHTS,
    INTERLEAVED,
    OTHER_FAMILIES,
)
from farspan.convert.names import template
from farspan.convert.sources import Place, Source
from farspan.errors import require, unknown
from farspan.ops import Llama3, Rotary

BROKEN = (ValueError, KeyError, IndexError, OSError, OverflowError, struct.error)
"""What gguf's reader raises on a file that is cut short or something else."""


class UnknownPackingError(ValueError):
    """A tensor packed in a way that came after the installed gguf: the file itself may be whole."""


class GgufFile(Source):
    """One .gguf file of a LLaMA-family model."""

    weights = GGUF_WEIGHTS
    dtype = torch.float32

    def __init__(self, path: Path) -> None:
        self.path = path
        reader = _opened(path)
        self._fields = {name: field.contents() for name, field in reader.fields.items()}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        # A GGUF shape counts from the fastest axis.
        self.shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}
        kind = self._fields.get("general.architecture")
        if kind not in GGUF_ARCHITECTURES:
            raise unknown(f"general.architecture of {str(path)!r}", kind, GGUF_ARCHITECTURES, OTHER_FAMILIES)
        self.place = Place("the GGUF metadata", self._names(str(kind)))
        with sound_config({"model_type": kind}, self.place):
            self.config = self._config(str(kind))

    def _names(self, kind: str) -> dict[str, str]:
        """transformers' name of a field → the name here; of two names, the one that the file has."""
        known = GGUF_CONFIG | GGUF_ROPE
        held_last = sorted(known, key=lambda theirs: f"{kind}.{theirs}" in self._fields)
        return {known[theirs]: f"{kind}.{theirs}" for theirs in held_last}

    def _config(self, kind: str) -> dict[str, Any]:
        for field in GGUF_NEEDED:
            require(
                f"{kind}.{field}" in self._fields,
                f"{str(self.path)!r} must give {kind}.{field}, got none; export the file again",
            )
        config = {
            ours: self._fields[f"{kind}.{theirs}"]
            for theirs, ours in GGUF_CONFIG.items()
            if f"{kind}.{theirs}" in self._fields
        }
        check_sizes(config, self.place)
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        rotated = self._fields.get(f"{kind}.rope.dimension_count", config["head_dim"])
        require(
            rotated == config["head_dim"],
            f"{kind}.rope.dimension_count must be the head width {config['head_dim']}, got {rotated}; "
            "models that rotate only part of a head are not supported",
        )
        scale = float(self._fields.get(f"{kind}.attention.scale", 0.0))  # 0 says the usual
        require(
            scale == 0 or math.isclose(scale, config["head_dim"] ** -0.5, rel_tol=1e-5),
            f"{kind}.attention.scale must be 1/√(head width) = {config['head_dim'] ** -0.5:.6g}, got {scale:.6g}; "
            "models that scale their scores otherwise are not supported",
        )
        if "token_embd.weight" in self.shapes:
            config["vocab_size"] = self.shapes["token_embd.weight"][0]
        if config.get("sliding_window") and kind == "llama":
            config["model_type"] = "mistral"
        for token in ("bos", "eos", "padding"):
            name = "pad" if token == "padding" else token
            config[f"{name}_token_id"] = self._fields.get(f"tokenizer.ggml.{token}_token_id")
        biased = "blk.0.attn_q.bias" in self.shapes
        return {
            "model_type": kind,
            **config,
            "tie_word_embeddings": "output.weight" not in self.shapes,
            "attention_bias": biased,
            "mlp_bias": "blk.0.ffn_up.bias" in self.shapes,
            "rope_parameters": self._rope(kind, config),
        }

    def _rope(self, kind: str, config: dict[str, Any]) -> dict[str, Any]:
        base = float(self._fields.get(f"{kind}.rope.freq_base", 10_000.0))
        scaling = self._scaling(kind, config)
        if "rope_freqs.weight" in self._tensors:
            require(
                not scaling,
                f"{kind}.rope.scaling must be absent beside the tensor 'rope_freqs.weight', got {scaling}; "
                "convert the safetensors folder instead",
            )
            scaling = self._llama3(base, config["head_dim"])
        return {"rope_theta": base, "rope_type": "default", **scaling}

    def _scaling(self, kind: str, config: dict[str, Any]) -> dict[str, Any]:
        """The law of scaling; {} for none. A factor without a type is linear."""
        prefix = f"{kind}.rope."
        found = {name[len(prefix) :]: value for name, value in self._fields.items() if name.startswith(f"{prefix}scal")}
        for name, value in found.items():
            require(
                name in GGUF_SCALING,
                f"{prefix}{name} must be absent, got {value!r}: this scaling is not supported; "
                "convert the safetensors folder instead",
            )
        law = found.get("scaling.type", "linear")
        factor = float(found.get("scaling.factor") or found.get("scale_linear") or 1.0)
        if law == "none" or (law in ("linear", "yarn") and factor == 1):
            return {}
        rope: dict[str, Any] = {"rope_type": law, "factor": factor}
        check_rope({"rope_parameters": rope}, self.place)
        longer = found.get("scaling.attn_factor", 1.0) * found.get("scaling.yarn_attn_factor", 1.0)
        require(
            law == "yarn" or longer == 1,
            f"{prefix}scaling.attn_factor must be 1 without yarn, got {longer} with {law}; "
            "convert the safetensors folder instead",
        )
        trained = found.get("scaling.original_context_length")
        if law == "yarn":
            trained = trained or config.get("max_position_embeddings")
            rope["beta_fast"] = found.get("scaling.yarn_beta_fast", 32.0)
            rope["beta_slow"] = found.get("scaling.yarn_beta_slow", 1.0)
            rope["attention_factor"] = longer * (0.1 * math.log(factor) + 1)
        return rope if trained is None else {**rope, "original_max_position_embeddings": trained}

    def _llama3(self, base: float, width: int) -> dict[str, Any]:
        """Llama 3.1 files hold no parameters of their law, only what divides each frequency: check it against 8192."""
        divisors = self._unpack("rope_freqs.weight").double()
        law = Llama3(round(float(divisors.max()), 3), 8192)
        expected = Rotary(width, base).frequencies() / Rotary(width, base, law).frequencies()
        fits = divisors.shape == expected.shape and torch.allclose(divisors, expected, rtol=1e-4)
        require(
            fits,
            "tensor 'rope_freqs.weight' must follow Llama 3.1's law (training length 8192, turns 1 to 4), got other "
            "factors; convert the safetensors folder instead",
        )
        return {
            "rope_type": "llama3",
            "factor": law.factor,
            "original_max_position_embeddings": law.train_length,
            "low_freq_factor": law.low_rotations,
            "high_freq_factor": law.high_rotations,
        }

    def _unpack(self, name: str) -> Tensor:
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        try:
            numbers = dequantize(tensor.data, tensor.tensor_type).copy()
        except NotImplementedError as error:
            raise ValueError(
                f"tensor {name!r} in {str(self.path)!r} must be packed in a way that gguf can unpack, got "
                f"{tensor.tensor_type.name}; convert another quantisation, or the safetensors folder"
            ) from error
        return torch.from_numpy(numbers).reshape(self.shapes[name])

    def read(self, name: str) -> Tensor:
        tensor = self._unpack(name)
        if GGUF_ARCHITECTURES[self._fields["general.architecture"]] and template(name)[0] in INTERLEAVED:
            width = self.config["head_dim"]
            pairs = tensor.unflatten(0, (-1, width // 2, 2))  # head, pair, member
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
        return tensor

    def carry(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        require(
            "tokenizer.ggml.tokens" in self._fields,
            f"{str(self.path)!r} must hold its tokenizer (the field tokenizer.ggml.tokens), got none; "
            "export the file again with its vocabulary",
        )
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(self.path.parent), gguf_file=self.path.name)
        except Exception as error:  # whatever a field of a wrong kind brings about inside
            raise ValueError(
                f"the tokenizer in {str(self.path)!r} could not be read ({type(error).__name__}: {error}); "
                "export the file again, or convert the safetensors folder"
            ) from error
        tokenizer.save_pretrained(folder)


def _opened(path: Path) -> Any:
    """gguf's reader, or one line about what the file lacks."""
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError as error:
        raise ValueError(f"a .gguf checkpoint needs the package {error.name}; pip install 'farspan[gguf]'") from error

    class Reader(GGUFReader):
        """Names the tensor that cannot be read, and says where the file ends too early."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if end > len(self.data):
                raise ValueError(f"the file ends too early: byte {end:,} is needed, it has {len(self.data):,}")
            return super()._get(offset, dtype, count, override_order)

        def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
            try:
                super()._build_tensors(start_offs, fields)
            except BROKEN:
                for field in fields:
                    _check_packing(path, field)
                    try:
                        super()._build_tensors(start_offs, [field])
                    except BROKEN as error:
                        raise ValueError(f"tensor {field.name!r} cannot be read: {error}") from error
                raise

    _check_version(path)
    try:
        return Reader(path)
    except UnknownPackingError:
        raise
    except BROKEN as error:
        raise ValueError(f"{str(path)!r} is not a whole GGUF file ({error}); download it again") from error


def _check_version(path: Path) -> None:
    from gguf.gguf_reader import READER_SUPPORTED_VERSIONS as KNOWN

    with path.open("rb") as file:
        head = file.read(8)
    version = int.from_bytes(head[4:], "little")
    other_order = version & 0xFFFF == 0  # written by a machine with the bytes the other way round
    require(
        head[:4] != b"GGUF" or len(head) < 8 or other_order or version in KNOWN,
        f"{str(path)!r} must be of GGUF version {' or '.join(map(str, KNOWN))}, got {version}; "
        "export it again in one of these, or convert the safetensors folder",
    )


def _check_packing(path: Path, field: Any) -> None:
    from gguf import GGMLQuantizationType

    number = int(field.parts[4][0])
    if number not in {kind.value for kind in GGMLQuantizationType}:
        raise UnknownPackingError(
            f"tensor {field.name!r} in {str(path)!r} must be packed in a way that gguf knows, got type {number}; "
            "install a newer gguf, convert another quantisation, or the safetensors folder"
        )
