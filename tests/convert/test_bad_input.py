"""What cannot be converted is refused in one line that names the tensor or field, and nothing is written."""

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from farspan.convert import from_pretrained
from tests.command_line import called
from tests.convert.sources import edit_config, saved, with_tokenizer

UP = "model.layers.1.mlp.up_proj.weight"


def tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    held = load_file(folder / "model.safetensors")
    change(held)
    save_file(held, folder / "model.safetensors")


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def lose_shard(folder: Path) -> None:
    saved(folder, max_shard_size="8KB")
    (folder / "model.safetensors").unlink()
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def spoil_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def swap_shards(folder: Path) -> None:
    saved(folder, max_shard_size="8KB")
    first, second = sorted(folder.glob("model-*.safetensors"))[:2]
    first.write_bytes(second.read_bytes())


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "architecture": (lambda f: edit_config(f, model_type="gpt2"), "model_type must be one of 'llama', .*, got 'gpt2'"),
    "family with a like name": (
        lambda f: edit_config(f, model_type="gemma"),
        "model_type must be one of .*, got 'gemma'; checkpoints of other families cannot be converted$",
    ),
    "no architecture": (lambda f: edit_config(f, remove=("model_type",)), "model_type must be one of .*, got None"),
    "missing tensor": (lambda f: tensors(f, lambda t: t.pop(UP)), f"tensor '{UP}' is missing from"),
    "extra tensor": (
        lambda f: tensors(f, lambda t: t.update({"model.layers.1.self_attn.sinks": torch.ones(4)})),
        "tensor 'model.layers.1.self_attn.sinks' .* has no place in a llama model of 3 layers",
    ),
    "bias the configuration does not name": (
        lambda f: tensors(f, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)})),
        "tensor 'model.layers.0.self_attn.q_proj.bias' .* has no place",
    ),
    "wrong shape": (
        lambda f: tensors(f, lambda t: t.update({UP: torch.ones(64, 31)})),
        rf"tensor '{UP}' must have shape \(64, 32\) by the configuration, got \(64, 31\)",
    ),
    "integers": (
        lambda f: tensors(f, lambda t: t.update({UP: torch.ones(64, 32, dtype=torch.int8)})),
        f"tensor '{UP}' must hold floating-point numbers, got I8",
    ),
    "NaN": (
        lambda f: tensors(f, lambda t: t[UP][2].fill_(torch.nan)),
        f"tensor '{UP}' in '.*' must hold finite numbers, got NaN; download it again",
    ),
    "infinity": (
        lambda f: tensors(f, lambda t: t["model.norm.weight"].fill_(-torch.inf)),
        "tensor 'model.norm.weight' in '.*' must hold finite numbers, got infinity; download it again",
    ),
    "too many layers": (lambda f: edit_config(f, num_hidden_layers=2), r"'model\.layers\.2\..*of 2 layers"),
    "quantised": (
        lambda f: edit_config(f, quantization_config={"quant_method": "gptq"}),
        "quantization_config must be absent, got 'gptq'",
    ),
    "truncated": (truncate, r"model.safetensors' is not a whole safetensors file .*; download or save it again"),
    "empty file": (lambda f: (f / "model.safetensors").write_bytes(b""), "is not a whole safetensors file"),
    "lost shard": (lose_shard, "names the shard 'model-00002-of-.*', which is missing"),
    "rope type": (
        lambda f: edit_config(f, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}),
        r"rope_parameters\['rope_type'\] must be .* got 'longrope'; checkpoints with other laws cannot be converted$",
    ),
    "rope type of our own kind": (
        lambda f: edit_config(f, model_type="farspan", rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}),
        r"rope_parameters\['rope_type'\] must be one of 'default', .*, got 'longrope'; choose one of these$",
    ),
    "old rope type": (
        lambda f: edit_config(f, remove=("rope_parameters",), rope_scaling={"type": "su", "factor": 2.0}),
        r"rope_scaling\['rope_type'\] must be one of .*, got 'su'",
    ),
    "partial rotation": (
        lambda f: edit_config(f, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        "partial_rotary_factor must be 1, got 0.5",
    ),
    "pickle": (only_pickle, "got only 'pytorch_model.bin' in .*, a pickle that could run code"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "checkpoint must have model.safetensors or"),
    "no configuration": (lambda f: (f / "config.json").unlink(), "checkpoint must have a config.json"),
    "broken configuration": (lambda f: (f / "config.json").write_text("{"), "config.json' is not JSON"),
    "configuration of another kind": (lambda f: (f / "config.json").write_text("[]"), "must hold a JSON object"),
    "no weight map": (
        lambda f: (f / "model.safetensors").rename(f / "model.safetensors.index.json").write_text("{}"),
        "model.safetensors.index.json' must have a weight_map, got none; download it again",
    ),
    "weight map as a list": (lambda f: spoil_index(f, []), "weight_map of .* must name a file for each tensor"),
    "weight map as null": (lambda f: spoil_index(f, None), "weight_map of .* must name a file for each tensor"),
    "a shard as a number": (lambda f: spoil_index(f, {"a": 3}), "weight_map of .* must name a file for each tensor"),
    "another shard": (swap_shards, "tensor '.*' is missing from '.*model-00001.*', where .*index.json says it is"),
    "activation": (lambda f: edit_config(f, hidden_act="slu"), "hidden_act must be one of .*, got 'slu'; did you mean"),
    "rope as text": (lambda f: edit_config(f, rope_parameters="x"), "rope_parameters must be an object .*, got 'x'"),
    "rope as a list": (lambda f: edit_config(f, rope_scaling=[]), r"rope_scaling must be an object .*, got \[\]"),
    "rope as a number": (lambda f: edit_config(f, rope_scaling=2), "rope_scaling must be an object .*, got 2"),
    "no key heads": (
        lambda f: edit_config(f, num_key_value_heads=0),
        "s num_key_value_heads must be at least 1, got 0",
    ),
    "no layers": (lambda f: edit_config(f, num_hidden_layers=0), "s num_hidden_layers must be at least 1, got 0"),
    "negative width": (lambda f: edit_config(f, intermediate_size=-64), "s intermediate_size must be .* got -64"),
    "negative vocabulary": (
        lambda f: edit_config(f, vocab_size=-5),
        "config.json's vocab_size must be .* got -5; repair",
    ),
    "negative hidden size": (lambda f: edit_config(f, hidden_size=-32), "s hidden_size must be at least 1, got -32"),
    "negative heads": (lambda f: edit_config(f, num_attention_heads=-4), "s num_attention_heads must be .*, got -4"),
    "factor as text": (
        lambda f: edit_config(f, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": "four"}),
        "config.json's rope_parameters.factor must be a number above 0, got 'four'; repair that field",
    ),
    "negative base": (
        lambda f: edit_config(f, rope_parameters={"rope_type": "default", "rope_theta": -1}),
        "config.json's rope_parameters.rope_theta must be a number above 1, got -1; repair that field",
    ),
    "negative base in an older file": (
        lambda f: edit_config(f, remove=("rope_parameters",), rope_theta=-1.0),
        "config.json's rope_theta must be a number above 1, got -1.0; repair that field",
    ),
    "dtype": (lambda f: edit_config(f, dtype="x"), "must be a valid llama configuration"),
    "architecture as a list": (lambda f: edit_config(f, model_type=[]), r"model_type must be one of .*, got \[\]"),
    "settings of generate": (
        lambda f: (f / "generation_config.json").write_text('{"watermarking_config": 3}'),
        "generation_config.json of .* is not valid .*; repair or remove it",
    ),
    "too few flags": (
        lambda f: edit_config(f, model_type="smollm3", no_rope_layers=[1]),
        "must be a valid smollm3 configuration",
    ),
    "half a width": (lambda f: edit_config(f, head_dim=1.5), "must be a valid llama configuration"),
    "own kind, bad field": (
        lambda f: edit_config(f, model_type="farspan", hidden_size="wide"),
        "must be a valid farspan configuration",
    ),
    "text for a number": (lambda f: edit_config(f, hidden_size="wide"), "must be a valid llama configuration"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_sources_are_refused(case: str, tmp_path: Path) -> None:
    saved(tmp_path)
    spoil, message = BAD[case]
    spoil(tmp_path)
    with pytest.raises(ValueError, match=message):
        from_pretrained(tmp_path)


def test_an_untied_head_under_a_tied_configuration_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"tensor 'lm_head.weight' must equal 'model.embed_tokens.weight'"):
        from_pretrained(tmp_path)


def test_targets_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(ValueError, match="did you mean 'coca-exact'"):
        from_pretrained(tmp_path, "coca-exat")
    with pytest.raises(ValueError, match="one entry for each of the 3 layers, got 2"):
        from_pretrained(tmp_path, ["rope", "rope"])
    with pytest.raises(ValueError, match="must be rope or CoCA with a softmax after a conversion, got 'alibi'"):
        from_pretrained(tmp_path, "alibi")
    for linear in ("cosformer", "linear-coca"):
        with pytest.raises(ValueError, match=f"after a conversion, got '{linear}'; train a model with it instead"):
            from_pretrained(tmp_path, linear)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p, "which does not exist"),
        (lambda p: p.with_suffix(".pt"), "got the pickle .*model.pt', which could run code when opened"),
        (lambda p: p.with_suffix(".txt"), "checkpoint must be a folder or a .gguf file"),
        (lambda p: p.with_suffix(".gguf"), "is not a whole GGUF file|needs the package gguf"),
    ],
)
def test_files_of_other_kinds_are_refused(make: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    path = make(tmp_path / "model")
    if path.suffix:
        path.write_bytes(pickle.dumps({"weight": 1}))
    with pytest.raises(ValueError, match=message):
        from_pretrained(path)


def test_numbers_too_large_for_the_wanted_dtype_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    tensors(tmp_path, lambda t: t[UP][2].fill_(1e5))
    with pytest.raises(ValueError, match=f"tensor '{UP}' .* got one too large for torch.float16; choose a wider dtype"):
        from_pretrained(tmp_path, dtype=torch.float16)
    assert from_pretrained(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_name_on_the_hub_must_be_downloaded_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="downloaded first: hf download HuggingFaceTB/SmolLM2-135M --local-dir Smol"):
        from_pretrained("HuggingFaceTB/SmolLM2-135M")
    (tmp_path / "models").mkdir()
    with pytest.raises(ValueError, match="got 'models/smol', which does not exist; check the path"):
        from_pretrained("models/smol")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json' is not JSON .*; download or save it again"),
        ("tokenizer.json", '{"version": "1.0"}', "tokenizer.json' is not a tokenizer .*; download or save it again"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json' must hold a JSON object"),
    ],
)
def test_a_broken_tokenizer_is_named_by_every_command(name: str, text: str, message: str, tmp_path: Path) -> None:
    source = with_tokenizer(tmp_path / "source")
    (source / name).write_text(text)
    (tmp_path / "a.txt").write_text("some words " * 99)
    for command in (
        ("convert", source, "--out", tmp_path / "out"),
        ("generate", source, "a"),
        ("eval", "ppl", source, "--text", tmp_path / "a.txt", "--lengths", 8, "--out", tmp_path / "out"),
    ):
        status, _, err = called(*command)
        assert status == 2
        assert re.search(message, err), err
        assert len(err.strip().splitlines()) == 1
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", ["architecture", "missing tensor", "pickle", "truncated", "NaN"])
def test_the_command_line_says_it_in_one_line_and_writes_nothing(case: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    saved(source)
    BAD[case][0](source)
    status, _, err = called("convert", source, "--attention", "rope", "--out", tmp_path / "out")
    assert status == 2
    assert re.search(BAD[case][1], err)
    assert len(err.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
