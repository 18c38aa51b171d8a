"""What cannot be read or converted raises one line that names the tensor, field or file, and nothing is left behind."""

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from farspan import FarspanConfig, FarspanForCausalLM
from farspan.convert import convert_folder, from_pretrained
from tests.checkpoints.sources import edit_config, saved, with_tokenizer
from tests.command_line import called

UP = "model.layers.1.mlp.up_proj.weight"
INDEX = "model.safetensors.index.json"


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        change(held)
        save_file(held, folder / "model.safetensors")

    return spoil


def config(remove: tuple[str, ...] = (), **changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, remove, **changes)


def rope(**values: Any) -> Callable[[Path], None]:
    return config(rope_parameters={"rope_type": "default", "rope_theta": 1e4, **values})


def swap_shards(folder: Path) -> None:
    saved(folder, max_shard_size="8KB")
    (folder / "model.safetensors").unlink()
    first, second = sorted(folder.glob("model-*.safetensors"))[:2]
    first.write_bytes(second.read_bytes())


def index(weight_map: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / "model.safetensors").unlink(missing_ok=True)
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return spoil


def climbing(folder: Path) -> None:
    """A shard elsewhere that is complete and readable."""
    held = load_file(folder / "model.safetensors")
    other = folder.parent / "elsewhere"
    other.mkdir()
    (folder / "model.safetensors").rename(other / "x.safetensors")
    index(dict.fromkeys(held, "../elsewhere/x.safetensors"))(folder)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "architecture": (config(model_type="gemma"), "model_type must be one of 'llama', .*, got 'gemma'; checkpoints of"),
    "missing tensor": (tensors(lambda t: t.pop(UP)), rf"tensor '{UP}' .* must have shape \(64, 32\) by .*, got none"),
    "extra tensor": (
        tensors(lambda t: t.update({"model.layers.1.self_attn.sinks": torch.ones(4)})),
        r"tensors \['model.layers.1.self_attn.sinks'\] .* are unknown to a llama model of 3 layers",
    ),
    "wrong shape": (
        tensors(lambda t: t.update({UP: torch.ones(64, 31)})),
        rf"tensor '{UP}' .* must have shape \(64, 32\) by the configuration, got \(64, 31\)",
    ),
    "integers": (
        tensors(lambda t: t.update({UP: torch.ones(64, 32, dtype=torch.int8)})),
        f"tensor '{UP}' must hold floating-point numbers, got I8",
    ),
    "NaN": (tensors(lambda t: t[UP][2].fill_(torch.nan)), f"tensor '{UP}' in '.*' must hold finite .*, got NaN"),
    "untied head": (config(tie_word_embeddings=True), "tensor 'lm_head.weight' must equal 'model.embed_tokens.weight'"),
    "too many layers": (config(num_hidden_layers=2), r"'model\.layers\.2\..*of 2 layers"),
    "quantised": (config(quantization_config={"quant_method": "gptq"}), "quantization_config must be absent, got 'gp"),
    "truncated": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-100]),
        r"model.safetensors' is not a complete safetensors file .*; download or save it again",
    ),
    "another shard": (swap_shards, "tensor '.*' must have shape .*, got none"),
    "a shard that climbs": (climbing, r"must name files beside it, got '\.\./elsewhere.*; .* do not trust"),
    "a lost shard": (index({UP: "gone.safetensors"}), "must name files beside it, got 'gone.safetensors'; download"),
    "no weight map": (index(None), "weight_map of .*index.json' must name files beside it, got none"),
    "pickle": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        r"must have model.safetensors .* a pickle .* could run code when opened: save the model",
    ),
    "no configuration": (lambda f: (f / "config.json").unlink(), "checkpoint must have a config.json"),
    "broken configuration": (
        lambda f: (f / "config.json").write_text("{"),
        "checkpoint .*config.json' is not valid JSON: .*; correct or replace it",
    ),
    "infinite setting": (
        lambda f: (f / "generation_config.json").write_text('{"temperature": Infinity}'),
        "generation_config.json' is not valid JSON: Infinity is not a number of JSON",
    ),
    "rope type": (
        rope(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[1.0] * 4),
        r"rope_parameters\['rope_type'\] must be one of 'default', .*, got 'longrope'",
    ),
    "partial rotation": (rope(partial_rotary_factor=0.5), "partial_rotary_factor must be 1, got 0.5"),
    "rope as text": (config(rope_parameters="x"), "must be a valid llama configuration .*rope_parameters.* value 'x'"),
    "billions of layers": (config(num_hidden_layers=2**31), "num_hidden_layers must be at most 4096, got 2147483648"),
    "settings of generate": (
        lambda f: (f / "generation_config.json").write_text('{"watermarking_config": 3}'),
        "generation_config.json' is not valid .*; correct or remove it",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_sources_raise_one_line(case: str, tmp_path: Path) -> None:
    saved(tmp_path / "source")
    spoil, message = BAD[case]
    spoil(tmp_path / "source")
    with pytest.raises(ValueError, match=message) as caught:
        from_pretrained(tmp_path / "source")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "coca-exat"}, "did you mean 'coca-exact'"),
        ({"attention": "hybrid-cosformer"}, "got 'hybrid-cosformer'; train a model with it"),
        ({"attention": "hybrid-rope", "window": 17}, "window must be 1 … 16, the training length, got 17"),
        ({"attention": "hybrid-rope", "window": 8, "global_every": 4}, "global_every must be 2 … 3"),
        ({"attention": "hybrid-rope", "window": 8, "global_layers": [3]}, "of the layers 0 … 2, got"),
        ({"attention": "hybrid-rope", "window": 8, "global_layers": "all"}, "must be 'auto', or at least 1"),
        ({"attention": "hybrid-rope", "global_layers": [1], "global_every": 2}, "give global_every or global_layers"),
        ({"attention": "rope", "window": 8}, "need attention, the name of a hybrid"),
    ],
    ids=str,
)
def test_targets_that_make_no_sense_raise_before_any_work(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "source")
    monkeypatch.delattr("farspan.checkpoints.convert.load")
    for call in (
        lambda: from_pretrained(tmp_path / "source", **options),
        lambda: convert_folder(tmp_path / "source", tmp_path / "out", **options),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_hybrid_of_a_checkpoint_with_windows_or_without_positions(tmp_path: Path) -> None:
    saved(tmp_path / "mistral", "mistral")
    with pytest.raises(ValueError, match="a checkpoint without windows of its own, got one with windows"):
        from_pretrained(tmp_path / "mistral", "hybrid-rope", window=4, global_every=3)
    saved(tmp_path / "smollm3", "smollm3")
    with pytest.raises(ValueError, match=r"layers \[1\] of the checkpoint have no positions and must be global"):
        from_pretrained(tmp_path / "smollm3", "hybrid-rope", window=4, global_layers=[2])
    found = from_pretrained(tmp_path / "smollm3", "hybrid-rope", window=4, global_layers=[1])
    assert [spec.rotary for spec in found.config.attention_specs] == [True, False, True]


def test_files_of_other_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, message in (
        ("model.pt", "must be a folder or one .gguf file, got .*model.pt; pickles are never opened"),
        ("model.gguf", "is not a complete GGUF file|needs the package gguf"),
    ):
        (tmp_path / name).write_bytes(pickle.dumps({"weight": 1}))
        with pytest.raises(ValueError, match=message):
            from_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    for name, message in (
        ("gone/owner/model", "which does not exist; check the path"),
        ("owner/model", "download it first: hf download owner/model --local-dir model"),
    ):
        with pytest.raises(ValueError, match=message):
            from_pretrained(Path(name))


def test_numbers_too_large_for_the_wanted_dtype(tmp_path: Path) -> None:
    saved(tmp_path)
    tensors(lambda t: t[UP][2].fill_(1e5))(tmp_path)
    with pytest.raises(ValueError, match=f"tensor '{UP}' .* as torch.float16, .* choose a wider dtype"):
        from_pretrained(tmp_path, dtype=torch.float16)
    assert from_pretrained(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", '{"version": "1.0"}', "tokenizer.json' is not a tokenizer .*; download or save it again"),
        ("model", "", "must have at most the model's vocab_size = 64 tokens, got 257"),
    ],
)
def test_a_broken_tokenizer_is_named_by_every_command(name: str, text: str, message: str, tmp_path: Path) -> None:
    source, out = with_tokenizer(tmp_path / "source"), ("--out", tmp_path / "out")
    if name == "model":
        saved(source, "llama")
    else:
        (source / name).write_text(text)
    (tmp_path / "a.txt").write_text("some words " * 99)
    for command in (
        ("convert", source, *out),
        ("export", source, *out),
        ("export", source, "--as", "llama", *out),
        ("generate", source, "a"),
        ("eval", "ppl", source, "--text", tmp_path / "a.txt", "--lengths", 8, *out),
    ):
        status, _, err = called(*command)
        assert (status, err.count("\n")) == (2, 1)
        assert re.search(message, err), err
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", 3])
def test_transformers_own_loader_stays_in_the_folder(name: Any, tmp_path: Path) -> None:
    FarspanForCausalLM(FarspanConfig.preset("tiny", num_hidden_layers=1)).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model.safetensors")
    (tmp_path / "model" / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(ValueError, match=r"weight_map of .* must name files beside it"):
        FarspanForCausalLM.from_pretrained(tmp_path / "model")
