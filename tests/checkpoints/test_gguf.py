"""GGUF files, written here with the gguf package, are read as transformers reads them."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel, SmolLM3Config, SmolLM3ForCausalLM

from farspan.convert import from_pretrained
from farspan.ops import Linear, Llama3, Rotary
from tests.checkpoints.sources import SHAPE, random_model, randomize, tokens
from tests.command_line import called

gguf = pytest.importorskip("gguf", reason="pip install 'farspan[gguf]'")
Q8_0, F32 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32


def write(
    path: Path,
    model: PreTrainedModel,
    arch: str,
    kind: Any = F32,
    extra: dict[str, torch.Tensor] | None = None,
    **fields: Any,
) -> None:
    """The model as a GGUF file, matrices packed as `kind`; what unpacking gives is put back into the model."""
    config, writer = model.config, gguf.GGUFWriter(path, arch)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    usual = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": width,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "rope.dimension_count": width,
    }
    adders = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for name, value in (usual | fields).items():
        if value is not None:
            adders[type(value)](f"{arch}.{name}", value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        packing = kind if parameter.ndim == 2 else F32
        tensor, pairs = parameter.detach(), None
        if arch in ("llama", "smollm3") and re.search("[qk]_proj", name):  # rows in the order (0, d/2, 1, d/2+1, …)
            order = torch.arange(len(tensor)).view(-1, 2, width // 2)
            pairs = order.mT.flatten()
            tensor = tensor[pairs]
        packed = gguf.quants.quantize(tensor.numpy().astype(np.float32), packing)
        if packing != F32:
            unpacked = torch.from_numpy(gguf.quants.dequantize(packed, packing))
            parameter.data = unpacked if pairs is None else unpacked[pairs.argsort()]
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), packed, raw_dtype=packing)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", [F32, Q8_0], ids=["F32", "Q8_0"])
@pytest.mark.parametrize("case", ["llama", "llama tied", "qwen2", "qwen3"])
def test_gguf_gives_the_sources_logits(case: str, kind: Any, tmp_path: Path) -> None:
    model, ids = random_model(case), tokens()
    write(tmp_path / "m.gguf", model, case.split()[0], kind)
    with torch.no_grad():
        assert (model(ids).logits - from_pretrained(tmp_path / "m.gguf")(ids).logits).abs().max() <= 1e-5


def test_smollm3_files_rotate_three_layers_of_four(tmp_path: Path) -> None:
    """The file has no field for it: what reads GGUF takes every fourth, as transformers does by default."""
    model = randomize(SmolLM3ForCausalLM(SmolLM3Config(**{**SHAPE, "num_hidden_layers": 5})))
    write(tmp_path / "m.gguf", model, "smollm3", F32)
    found, ids = from_pretrained(tmp_path / "m.gguf"), tokens()
    assert [spec.rotary for spec in found.config.attention_specs] == [True, True, True, False, True]
    with torch.no_grad():
        assert (model(ids).logits - found(ids).logits).abs().max() <= 1e-5


def test_transformers_reads_the_same_file_alike(tmp_path: Path) -> None:
    """The test's own writer is no witness to itself; transformers' reader is."""
    write(tmp_path / "m.gguf", random_model("llama"), "llama", Q8_0)
    options = {"gguf_file": "m.gguf", "quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
    theirs, ids = AutoModelForCausalLM.from_pretrained(tmp_path, **options), tokens()
    with torch.no_grad():
        assert (theirs(ids).logits - from_pretrained(tmp_path)(ids).logits).abs().max() <= 1e-5


def test_llama3_frequencies_are_recognised_and_others_raise(tmp_path: Path) -> None:
    model, plain = random_model("llama"), Rotary(8, 500_000.0)
    model.config.rope_parameters["rope_theta"] = plain.base
    divisors = plain.frequencies() / Rotary(8, plain.base, Llama3(8, 8192)).frequencies()
    write(tmp_path / "m.gguf", model, "llama", extra={"rope_freqs.weight": divisors})
    assert from_pretrained(tmp_path / "m.gguf").config.rotary().scaling == Llama3(8.0, 8192)
    write(tmp_path / "n.gguf", model, "llama", extra={"rope_freqs.weight": divisors.flip(0)})
    with pytest.raises(ValueError, match=r"tensor 'rope_freqs.weight' must follow Llama 3.1's method"):
        from_pretrained(tmp_path / "n.gguf")


@pytest.mark.parametrize(
    ("fields", "method"),
    [
        ({}, None),
        ({"rope.scaling.factor": 0.0}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.factor": 4.0}, Linear(4.0)),
        ({"rope.scale_linear": 4.0}, Linear(4.0)),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 1.0}, None),
    ],
    ids=str,
)
def test_a_scaling_method_is_read_completely(fields: dict[str, Any], method: object, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", random_model("llama"), "llama", **fields)
    assert from_pretrained(tmp_path / "m.gguf").config.rotary().scaling == method


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention.head_count_kv": 0}, "num_key_value_heads must be 1 … 4096, got 0"),
        ({"rope.freq_base": 0.5}, "base must be greater than 1, got 0.5"),
        ({"rope.scale_linear": -4.0}, "scaling factor must be at least 1, got -4.0"),
        ({"attention.sliding_window": "wide"}, "must be a valid mistral configuration"),  # a window makes it one
        ({"attention.scale": 0.5}, "must be rotated whole and have the attention.scale 0.353553, got 8 and 0.5"),
        ({"rope.dimension_count": 4}, "must be rotated whole .*, got 4 and the default"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "got {'type': 'yarn', 'factor': 4.0}; conv"),
    ],
    ids=str,
)
def test_wrong_fields_are_named_as_the_metadatas(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", random_model("llama"), "llama", **fields)
    with pytest.raises(ValueError, match=f"^the GGUF metadata.*{message}") as caught:
        from_pretrained(tmp_path / "m.gguf")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("field", "value"), [("embedding_length", None), ("block_count", 0)])
def test_sizes_must_be_there(field: str, value: int | None, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", random_model("llama"), "llama", **{field: value})
    with pytest.raises(ValueError, match=f"m.gguf' must give llama.{field} as a number from 1 on, got {value}; export"):
        from_pretrained(tmp_path / "m.gguf")


def test_broken_files(tmp_path: Path) -> None:
    path, model = tmp_path / "m.gguf", random_model("llama")
    write(path, model, "llama")
    complete = path.read_bytes()
    for share in (0.0, 0.0001, 0.001, 0.02, 0.5, 0.99):
        path.write_bytes(complete[: int(len(complete) * share)])
        with pytest.raises(ValueError, match=re.escape("m.gguf' is not a complete GGUF file")):
            from_pretrained(path)
    path.write_bytes(complete[:4] + (99).to_bytes(4, "little") + complete[8:])
    with pytest.raises(ValueError, match=r"m.gguf' is not a complete GGUF file .*version 99"):
        from_pretrained(path)
    path.write_bytes(complete.replace(b"llama", b"gpt2x"))
    with pytest.raises(ValueError, match=r"general.architecture of .* must be one of 'llama', .*, got 'gpt2x'"):
        from_pretrained(path)
    write(path, model, "llama", extra={"blk.0.odd.weight": torch.ones(3)})
    with pytest.raises(ValueError, match=r"tensors \['blk.0.odd.weight'\] .* are unknown to"):
        from_pretrained(path)


def test_a_file_without_a_tokenizer_raises_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "m.gguf", random_model("llama"), "llama")
    monkeypatch.delattr("farspan.checkpoints.convert.load")
    status, _, err = called("convert", tmp_path / "m.gguf", "--attention", "rope", "--out", tmp_path / "out")
    assert (status, err.count("\n")) == (2, 1)
    assert re.search(r"m.gguf' must hold its tokenizer \(the field tokenizer.ggml.tokens\), got none; export", err)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
