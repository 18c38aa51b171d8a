"""GGUF files, written here with the gguf package, are read as transformers reads them."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, SmolLM3Config, SmolLM3ForCausalLM

from farspan.convert import from_pretrained
from farspan.convert.families import GGUF_WEIGHTS, INTERLEAVED
from farspan.convert.names import filled, template
from farspan.ops import Linear, YaRN
from tests.command_line import called
from tests.convert.sources import SHAPE, random_model, tokens

gguf = pytest.importorskip("gguf", reason="pip install 'farspan[gguf]'")
from gguf.quants import quantize  # noqa: E402

PAIRED = ("llama", "smollm3")
Q8_0, F32 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32


def interleave(x: torch.Tensor, width: int) -> torch.Tensor:
    """Rows (0 … d/2-1, d/2 … d-1) of each head in the order (0, d/2, 1, d/2+1, …)."""
    order = torch.arange(width).view(2, -1).T.flatten()
    return x.unflatten(0, (-1, width))[:, order].flatten(0, 1)


def write(
    path: Path,
    model: PreTrainedModel,
    arch: str,
    kind: Any = F32,
    extra: dict[str, torch.Tensor] | None = None,
    **fields: Any,
):
    """The model as a GGUF file, matrices packed as `kind`; what unpacking gives is put back into the model."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(width)
    for name, value in fields.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"{arch}.{name}", value)
    inverse = {ours: theirs for theirs, ours in GGUF_WEIGHTS.items()}
    for name, parameter in model.named_parameters():
        pattern, layer = template(name)
        tensor = parameter.detach()
        if arch in PAIRED and inverse[pattern] in INTERLEAVED:
            tensor = interleave(tensor, width)
        packing = kind if tensor.ndim == 2 else F32
        packed = quantize(tensor.numpy().astype(np.float32), packing)
        if packing != F32:
            unpacked = torch.from_numpy(gguf.quants.dequantize(packed, packing))
            paired = arch in PAIRED and inverse[pattern] in INTERLEAVED
            parameter.data = deinterleave(unpacked, width) if paired else unpacked
        writer.add_tensor(filled(inverse[pattern], layer), packed, raw_dtype=packing)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def deinterleave(x: torch.Tensor, width: int) -> torch.Tensor:
    order = torch.arange(width).view(-1, 2).T.flatten()
    return x.unflatten(0, (-1, width))[:, order].flatten(0, 1)


@pytest.mark.parametrize("kind", [F32, Q8_0], ids=["F32", "Q8_0"])
@pytest.mark.parametrize("case", ["llama", "llama tied", "qwen2", "qwen3"])
def test_gguf_gives_the_sources_logits(case: str, kind: Any, tmp_path: Path) -> None:
    model, ids = random_model(case), tokens()
    write(tmp_path / "m.gguf", model, case.split()[0], kind)
    with torch.no_grad():
        expected, found = model(ids).logits, from_pretrained(tmp_path / "m.gguf")(ids).logits
    assert (expected - found).abs().max() <= 1e-5


def test_smollm3_files_rotate_three_layers_of_four(tmp_path: Path) -> None:
    """The file has no field for it: what reads GGUF takes every fourth, as transformers does by default."""
    config = SmolLM3Config(**{**SHAPE, "num_hidden_layers": 5})
    model, ids = SmolLM3ForCausalLM(config).eval(), tokens()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15)
    write(tmp_path / "m.gguf", model, "smollm3", F32)
    found = from_pretrained(tmp_path / "m.gguf")
    assert [spec.rotary for spec in found.config.attention_specs] == [True, True, True, False, True]
    with torch.no_grad():
        assert (model(ids).logits - found(ids).logits).abs().max() <= 1e-5


def test_transformers_reads_the_same_file_alike(tmp_path: Path) -> None:
    """The test's own writer is no witness to itself; transformers' reader is."""
    from transformers import GgufConfig

    write(tmp_path / "m.gguf", random_model("llama"), "llama", Q8_0)
    options = {"gguf_file": "m.gguf", "quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
    theirs, ids = AutoModelForCausalLM.from_pretrained(tmp_path, **options), tokens()
    with torch.no_grad():
        assert (theirs(ids).logits - from_pretrained(tmp_path)(ids).logits).abs().max() <= 1e-5


def test_llama3_frequencies_are_recognised_and_others_refused(tmp_path: Path) -> None:
    from farspan.ops import Llama3, Rotary

    model, plain = random_model("llama"), Rotary(8, 500_000.0)
    model.config.rope_parameters["rope_theta"] = plain.base
    divisors = plain.frequencies() / Rotary(8, plain.base, Llama3(8, 8192)).frequencies()
    write(tmp_path / "m.gguf", model, "llama", extra={"rope_freqs.weight": divisors})
    assert from_pretrained(tmp_path / "m.gguf").config.rotary().scaling == Llama3(8.0, 8192)
    write(tmp_path / "n.gguf", model, "llama", extra={"rope_freqs.weight": divisors.flip(0)})
    with pytest.raises(ValueError, match=r"tensor 'rope_freqs.weight' must follow Llama 3.1's law"):
        from_pretrained(tmp_path / "n.gguf")


@pytest.mark.parametrize(
    ("fields", "law"),
    [
        ({}, None),
        ({"rope.scaling.factor": 0.0}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.factor": 4.0}, Linear(4.0)),
        ({"rope.scale_linear": 4.0}, Linear(4.0)),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, YaRN(4.0, 16, temperature=0.1 * math.log(4) + 1)),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 8,
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.yarn_beta_slow": 2.0,
                "rope.scaling.attn_factor": 0.5,
            },
            YaRN(4.0, 8, 16.0, 2.0, 0.5 * (0.1 * math.log(4) + 1)),
        ),
    ],
    ids=str,
)
def test_a_law_of_scaling_is_read_whole(fields: dict[str, Any], law: object, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", random_model("llama"), "llama", **fields)
    assert from_pretrained(tmp_path / "m.gguf").config.rotary().scaling == law


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope.scaling.alpha": 50.0}, r"llama.rope.scaling.alpha must be absent, got 50.0"),
        ({"rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 0.5}, "attn_factor must be 1 without yarn, got 0.5"),
        ({"attention.scale": 0.5}, r"llama.attention.scale must be .* = 0.353553, got 0.5"),
    ],
    ids=str,
)
def test_scaling_that_has_no_counterpart_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", random_model("llama"), "llama", **fields)
    with pytest.raises(ValueError, match=message):
        from_pretrained(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("changes", "fields", "message"),
    [
        ({"num_key_value_heads": 0}, {}, "llama.attention.head_count_kv must be at least 1, got 0; repair that field"),
        ({"num_attention_heads": 0}, {}, "llama.attention.head_count must be at least 1, got 0; repair that field"),
        ({"rope_parameters": {"rope_theta": 0.5}}, {}, "llama.rope.freq_base must be a number above 1, got 0.5"),
        ({}, {"rope.scaling.factor": -4.0}, "llama.rope.scaling.factor must be a number above 0, got -4.0"),
        ({}, {"rope.scale_linear": -4.0}, "llama.rope.scale_linear must be a number above 0, got -4.0"),
        (
            {},
            {"rope.scaling.type": "yarn", "rope.scaling.factor": -4.0},
            "llama.rope.scaling.factor must be a number above 0, got -4.0",
        ),
        (
            {},
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_beta_fast": -1.0},
            "llama.rope.scaling.yarn_beta_fast must be a number above 0, got -1.0",
        ),
        ({}, {"rope.scaling.type": "longrope"}, "llama.rope.scaling.type must be one of .*, got 'longrope'; checkp"),
    ],
    ids=str,
)
def test_fields_are_refused_by_the_names_that_the_file_has_for_them(
    changes: dict[str, Any], fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Not by those of a config.json, which it does not have."""
    model = random_model("llama")
    model.config.head_dim = 8  # else the writer divides by the number of heads
    for name, value in changes.items():
        setattr(model.config, name, value)
    write(tmp_path / "m.gguf", model, "llama", **fields)
    with pytest.raises(ValueError, match=f"^the GGUF metadata's {message}"):
        from_pretrained(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("heads", "fields", "kind"),
    [([4, 4, 4], {}, "llama"), (4, {"attention.sliding_window": "wide"}, "mistral")],  # a window makes it a mistral
    ids=["heads layer by layer", "text for a number"],
)
def test_a_field_of_a_wrong_kind_is_the_metadatas_fault(
    heads: Any, fields: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    model = random_model("llama")
    model.config.head_dim = 8
    vars(model.config)["num_attention_heads"] = heads  # transformers itself would refuse a list
    write(tmp_path / "m.gguf", model, "llama", **fields)
    with pytest.raises(ValueError, match=f"^the GGUF metadata must be a valid {kind} configuration") as caught:
        from_pretrained(tmp_path / "m.gguf")
    assert "config.json" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_broken_files_are_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "m.gguf", random_model("llama")
    write(path, model, "llama")
    whole = path.read_bytes()
    for share in (0.0, 0.0001, 0.001, 0.02, 0.5, 0.99):
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(ValueError, match=re.escape("m.gguf' is not a whole GGUF file")) as caught:
            from_pretrained(path)
        assert share == 0.0 or "the file ends too early: byte " in str(caught.value)
        assert (share < 0.5) or re.search(r"\(tensor '[a-z0-9_.]+' cannot be read: ", str(caught.value))
    path.write_bytes(whole[:4] + (99).to_bytes(4, "little") + whole[8:])
    with pytest.raises(ValueError, match=r"m.gguf' must be of GGUF version 2 or 3, got 99; export it again"):
        from_pretrained(path)
    after = whole.index(b"blk.1.attn_k.weight") + len(b"blk.1.attn_k.weight")  # two axes, and then the type
    path.write_bytes(whole[: after + 20] + (999).to_bytes(4, "little") + whole[after + 24 :])
    with pytest.raises(ValueError, match=r"^tensor 'blk.1.attn_k.weight' in .* gguf knows, got type 999; install"):
        from_pretrained(path)
    write(path, model, "gpt2")
    with pytest.raises(ValueError, match=r"general.architecture of .* must be one of 'llama', .*, got 'gpt2'"):
        from_pretrained(path)
    write(path, model, "llama", extra={"blk.0.odd.weight": torch.ones(3)})
    with pytest.raises(ValueError, match=r"tensor 'blk.0.odd.weight' .* has no place"):
        from_pretrained(path)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"must give llama.embedding_length, got none"):
        from_pretrained(path)


def test_a_file_without_a_tokenizer_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "m.gguf", random_model("llama"), "llama")
    monkeypatch.delattr("farspan.convert.pretrained.load")
    status, _, err = called("convert", tmp_path / "m.gguf", "--attention", "rope", "--out", tmp_path / "out")
    assert status == 2
    assert re.search(r"m.gguf' must hold its tokenizer \(the field tokenizer.ggml.tokens\), got none; export", err)
    assert len(err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    model = random_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3, 4] = torch.inf
    write(tmp_path / "m.gguf", model, "llama")
    with pytest.raises(ValueError, match=r"tensor 'blk.1.attn_k.weight' in '.*m.gguf' must hold .*, got infinity"):
        from_pretrained(tmp_path / "m.gguf")
