"""What cannot be converted is refused in one line that names the tensor or field, and nothing is written."""

import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from farspan.convert import from_pretrained
from tests.convert.sources import edit_config, saved
from tests.convert.test_folder import called

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


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "architecture": (lambda f: edit_config(f, model_type="gpt2"), "model_type must be one of 'llama', .*, got 'gpt2'"),
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
        r"rope_parameters\['rope_type'\] must be one of 'default', .*, got 'longrope'",
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
    with pytest.raises(ValueError, match="must be rope or CoCA after a conversion, got 'alibi'"):
        from_pretrained(tmp_path, "alibi")


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


@pytest.mark.parametrize("case", ["architecture", "missing tensor", "pickle", "truncated"])
def test_the_command_line_says_it_in_one_line_and_writes_nothing(case: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    saved(source)
    BAD[case][0](source)
    status, _, err = called("convert", source, "--attention", "rope", "--out", tmp_path / "out")
    assert status == 2
    assert re.search(BAD[case][1], err)
    assert len(err.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
