"""`farspan convert`: hybrids, folders that are complete or absent, conversions back, and what the command says."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from farspan import FarspanConfig, FarspanForCausalLM
from farspan.checkpoints import attention_reach, generate, read_note, replace_attention, write_config
from farspan.convert import Target, convert_folder, from_pretrained
from farspan.layers import AttentionSpec
from tests.checkpoints.sources import saved, tokens, with_tokenizer
from tests.command_line import called, farspan

HYBRIDS = ["hybrid-rope", "hybrid-coca-exact", "hybrid-coca-polar", "hybrid-pope"]


def specs(folder: Path) -> list[tuple[str, int | None, bool]]:
    return [(s.name, s.window, s.rotary) for s in from_pretrained(folder, None).config.attention_specs]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model with its tokenizer, beside a.txt to calibrate on."""
    (tmp_path / "a.txt").write_text("some words in a row, and then others. " * 40)
    return with_tokenizer(tmp_path / "source")


def calibrating(folder: Path) -> list[Any]:
    return ["--calibrate", folder / "a.txt", "--calibrate-tokens", 1024, "--calibrate-steps", 1]


# Hybrids


@pytest.mark.parametrize("attention", HYBRIDS)
@pytest.mark.parametrize("case", ["llama biases", "qwen3 biases"])
def test_a_hybrid_has_windows_and_plain_global_layers_and_can_be_saved(
    attention: str, case: str, tmp_path: Path
) -> None:
    source, ids = saved(tmp_path / "source", case), tokens(14)
    model = from_pretrained(tmp_path / "source", attention, window=6, global_every=3)
    kind = attention.removeprefix("hybrid-")
    found = [(s.name, s.window, s.rotary) for s in model.config.attention_specs]
    assert found == [(kind, 6, True), (kind, 6, True), ("rope", None, False)]
    assert model.config.log_length
    assert model.model.layers[2].self_attn.log_length == 16
    for leaf in ("q_proj", "k_proj", "v_proj", "o_proj"):  # nothing of a global layer is changed
        theirs = source.model.layers[2].self_attn.get_submodule(leaf).weight
        assert torch.equal(model.model.layers[2].self_attn.get_submodule(leaf).weight, theirs)
    model.save_pretrained(tmp_path / "ours")
    with torch.no_grad():
        assert model(ids).logits.isfinite().all()
        for again in (
            AutoModelForCausalLM.from_pretrained(tmp_path / "ours"),
            from_pretrained(tmp_path / "ours", None),
        ):
            assert torch.equal(again(ids).logits, model(ids).logits)
            assert again.config.log_length


def test_window_layers_of_hybrid_rope_keep_their_weights_and_logits_within_the_window(tmp_path: Path) -> None:
    """With the last layer global, the layers below give the source's hidden states for the first `window` tokens."""
    source, ids = saved(tmp_path), tokens(16)
    model = from_pretrained(tmp_path, "hybrid-rope", window=8, global_layers=[2])
    for name, parameter in source.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter)
    with torch.no_grad():
        ours, theirs = (m(ids, output_hidden_states=True).hidden_states[2] for m in (model, source))
    assert (ours[:, :8] - theirs[:, :8]).abs().max() <= 1e-5
    assert (ours[:, 9:] - theirs[:, 9:]).abs().max() > 1e-3


def far_and_near() -> FarspanForCausalLM:
    """Four layers, of which 1 and 3 attend to all keys alike and the others to the nearest."""
    shape = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": 64, "train_length": 64}
    model = FarspanForCausalLM(FarspanConfig.preset("tiny", attention="rope", qkv_bias=True, **shape)).eval()
    with torch.no_grad():
        for index, block in enumerate(model.model.layers):
            layer = block.self_attn
            for name in ("q_proj", "k_proj"):
                layer.get_submodule(name).weight.zero_()
                layer.get_submodule(name).bias.fill_(0.0 if index % 2 else 3.0)  # RoPE of equal vectors: near keys
    return model


def test_auto_takes_the_layers_that_reach_furthest_and_notes_it(tmp_path: Path) -> None:
    model, ids = far_and_near(), torch.randint(0, 64, (3, 40))
    reach = attention_reach(model, ids, 8)
    assert min(reach[1], reach[3]) > 2 * max(reach[0], reach[2])
    # Uniform attention of query m: the mean over m of Σ_{d = 8 … m} d / (m + 1)
    expected = sum(sum(range(8, m + 1)) / (m + 1) for m in range(8, 40)) / 32
    assert reach[1] == pytest.approx(expected, rel=1e-4)
    target, found = Target("hybrid-rope", 8, 2, "auto").measured(model, ids)
    assert (target.global_layers, found) == ((1, 3), reach)
    with pytest.raises(ValueError, match="sequences must be longer than the window to measure reach, got 40 tokens"):
        attention_reach(model, ids, 40)


@pytest.mark.parametrize("text", [False, True], ids=["the library's sources", "a text"])
def test_auto_from_the_command_line_and_in_python(text: bool, source: Path, tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    options: list[Any] = ["--attention", "hybrid-coca-exact", "--window", 4, "--global-layers", "auto"]
    options += ["--global-every", 3, *(calibrating(tmp_path) if text else [])]
    status, out, err = called("convert", source, *options, "--out", ours)
    assert status == 0, err
    note = json.loads((ours / "conversion.json").read_text())
    assert (read_note(ours), len(note["reach"])) == (source, 3)
    assert note["reach_measured_on"] == ([str(tmp_path / "a.txt")] if text else ["stdlib"])
    chosen = note["reach"].index(max(note["reach"]))
    assert note["global_layers"] == [chosen]
    assert f"global layers: {chosen} (reach " in out
    assert [window is None for _, window, _ in specs(ours)] == [index == chosen for index in range(3)]
    assert ("start from copied weights" in err) == (not text)
    assert (ours / "calibration.json").is_file() == text
    if not text:
        model = from_pretrained(source, "hybrid-coca-exact", window=4, global_every=3, global_layers="auto")
        assert [s.window is None for s in model.config.attention_specs].index(True) == chosen


def test_named_global_layers_and_calibration_from_the_command_line(source: Path, tmp_path: Path) -> None:
    ours, options = tmp_path / "ours", ("--attention", "hybrid-rope", "--window", 8, "--global-layers")
    length = ("--calibrate-length", 9)
    status, out, err = called("convert", source, *calibrating(tmp_path), *length, *options, "0,2", "--out", ours)
    assert status == 0, err
    assert "copied" not in err
    assert specs(ours) == [("rope", None, False), ("rope", 8, True), ("rope", None, False)]
    report = json.loads((ours / "calibration.json").read_text())
    assert (report["schema"], report["kind"], [row["layer"] for row in report["rows"]]) == (2, "calibration", [0, 2])
    assert "global layers: 0, 2" in out
    assert "calibrated on 1,024 tokens" in out
    assert "…" not in out
    assert max(map(len, out.splitlines()[:-1])) <= 80
    before, after = (from_pretrained(p, None).model.layers[1].self_attn.q_proj.weight for p in (source, ours))
    assert torch.equal(before, after)
    status, _, err = called("convert", source, *options, "a", "--out", tmp_path / "x")
    assert (status, err.count("\n")) == (2, 1)
    assert "--global-layers must be auto or layer numbers separated by commas, got 'a'" in err


# The command


def test_convert_and_generate_from_the_command_line(source: Path, tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    status, out, err = called("convert", source, "--attention", "coca-slack", "--out", ours)
    assert status == 0, err
    assert f"written: {ours}" in out.replace("\n", "")
    assert err == (
        "farspan: 3 layers start from copied weights and do not yet compute what the original did: "
        "convert with --calibrate TEXT, or train them with farspan finetune\n"
    )
    assert json.loads((ours / "config.json").read_text())["architectures"] == ["FarspanForCausalLM"]
    assert [name for name, *_ in specs(ours)] == ["coca-slack"] * 3
    assert AutoTokenizer.from_pretrained(ours)("ab").input_ids == [98, 99]
    status, out, err = called("generate", ours, "hello", "--max-new-tokens", 8)
    assert status == 0, err
    assert out == generate(ours, "hello", max_new_tokens=8) + "\n"


def test_what_cannot_be_calibrated(source: Path, tmp_path: Path) -> None:
    options = (*calibrating(tmp_path), "--out", tmp_path / "out")
    status, _, err = called("convert", source, *options)
    assert (status, err.count("\n")) == (2, 1)
    assert "calibration needs attention, the one to fit, got" in err
    (tmp_path / "a.txt").write_text("short")
    status, _, err = called("convert", source, "--attention", "coca-exact", *options)
    assert (status, err.count("\n")) == (2, 1)
    assert "text must give at least two sequences of 16 tokens, got 0" in err
    assert {path.name for path in tmp_path.iterdir()} == {"source", "a.txt"}


# Conversions back


@pytest.mark.parametrize(
    ("changes", "to", "message"),
    [
        ({"attention": "coca-exact"}, "llama", "attention .coca-exact; it would have rope"),
        ({"attention": {"kind": "rope", "window": 8}}, "llama", "attention .rope window 8; it would have rope"),
        ({"attention": [{"kind": "rope", "window": w} for w in (4, 8, 4, 8)]}, "smollm3", "window 4, rope window 8"),
        ({"qkv_bias": True}, "llama", "cannot have this model's qkv_bias"),
        ({"qk_norm": True}, "mistral", "cannot have this model's qk_norm"),
        ({"rope_parameters": {"rope_type": "ntk", "factor": 2.0}}, "llama", "must be of a type that transformers has"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "llama", "in mode per_query"),
        ({}, "lama", "did you mean 'llama'"),
    ],
)
def test_what_another_family_cannot_hold(changes: dict, to: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_config(FarspanConfig.preset("tiny", **{"attention": "rope", **changes}), to)


def test_a_folder_of_version_0_1_still_loads(tmp_path: Path) -> None:
    """Collinear global layers, which conversions no longer make, and a note without layers."""
    saved(tmp_path)
    model, ids = from_pretrained(tmp_path), tokens()
    for layer, spec in enumerate((AttentionSpec("coca", window=8), AttentionSpec("coca", rotary=False))):
        replace_attention(model, layer, spec)
    model.save_pretrained(tmp_path / "old")
    (tmp_path / "old" / "conversion.json").write_text('{"schema": 1, "source": "/models/llama"}')
    with torch.no_grad():
        assert torch.equal(from_pretrained(tmp_path / "old", None)(ids).logits, model(ids).logits)
    assert read_note(tmp_path / "old") == Path("/models/llama")


# Folders


def test_large_models_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "source", "qwen2")
    monkeypatch.setattr("farspan.checkpoints.convert.SHARD_SIZE", "20KB")
    convert_folder(tmp_path / "source", tmp_path / "ours", "coca-exact")
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 2
    ids, model = tokens(), from_pretrained(tmp_path / "source", "coca-exact")
    for again in (FarspanForCausalLM.from_pretrained(tmp_path / "ours"), from_pretrained(tmp_path / "ours", None)):
        assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("out", ["out", "a/b/out"])
def test_a_full_disk_leaves_nothing(out: str, tmp_path: Path) -> None:
    """A real write fails: the process may not make files of more than 4 kB."""
    saved(tmp_path / "source")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    done = farspan("convert", tmp_path / "source", "--out", tmp_path / out, before=limit)
    assert done.returncode == 2
    assert "cannot write" in done.stderr
    assert "free some space" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_only_a_new_or_empty_folder_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "source")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("x")
    with pytest.raises(ValueError, match=r"out must be a new folder or one .* with 'mine'"):
        convert_folder(tmp_path / "source", tmp_path / "there")
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["mine"]
    (tmp_path / "there" / "mine").unlink()
    (tmp_path / "link").symlink_to("there")
    convert_folder(tmp_path / "source", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / "model.safetensors").is_file()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="out must be a new folder, got the current one"):
        convert_folder(tmp_path / "source", ".")


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_rights_are_those_of_the_umask(umask: int, tmp_path: Path) -> None:
    saved(tmp_path / "source")
    before = os.umask(umask)
    try:
        convert_folder(tmp_path / "source", tmp_path / "out")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~umask
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()} == {0o666 & ~umask}
