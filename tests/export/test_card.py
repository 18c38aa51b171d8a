"""The model card says what was measured, of which weights, and nothing else."""

import re
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from yaml import safe_load

from farspan.convert import convert_folder, from_pretrained
from farspan.data import load_tokenizer
from tests.command_line import called
from tests.export.rows import perplexity, result
from tests.models.small import make


def test_the_card_holds_the_numbers_and_where_they_come_from(exported: Path) -> None:
    _, front, card = (exported / "README.md").read_text().split("---\n", 2)
    head = safe_load(front)
    assert head["license"] == "apache-2.0"
    assert head["pipeline_tag"] == "text-generation"
    assert {"farspan", "coca", "cosformer", "linear-coca"} <= set(head["tags"])
    assert "an experiment of farspan" in card
    for line in (
        "| Scaling | 512 | 1,024 |",
        "| no scaling | 20.25 | 19.50 |",
        "| dynamic NTK 4 | — | 18.75 |",
        "| dynamic NTK 4 | 0.70 (95% 0.40–0.89) |",
        "Perplexity by window length (context cut to the training length, stride 512)",
        "`farspan eval ppl 'x'`; CPU, commit abc",
        "| Layers | 1 coca-exact (window 8), 1 rope, 1 coca-slack (without positions)",
        "| Training length | 64 tokens |",
    ):
        assert line in card
    assert " ".join(card.split()).count("seed 0, torch 2; nothing in the file ties it to these weights") == 3


@pytest.mark.parametrize(
    ("layers", "share"),
    [(["rope"] * 2, "100%"), (["coca-exact"] * 2, "75%"), (["rope", {"kind": "rope", "window": 16}], "62%")],
)
def test_the_card_says_how_large_the_cache_is_and_how_positions_are_scaled(
    layers: list[Any], share: str, tmp_path: Path
) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2.0}
    shape = {"num_hidden_layers": 2, "vocab_size": 257, "train_length": 64, "rope_parameters": rope}
    model = make(layers, dtype=torch.float32, **shape)
    with torch.no_grad():
        held = model(torch.ones(1, 64, dtype=torch.long), use_cache=True).past_key_values.nbytes
    model.save_pretrained(tmp_path / "model")
    load_tokenizer("bytes").save(tmp_path / "model")
    assert called("export", tmp_path / "model", "--out", tmp_path / "hub")[0] == 0
    card = (tmp_path / "hub" / "README.md").read_text()
    assert f"| Cache | {held / 2**20:.2f} MiB for 64 tokens, {share} of full RoPE attention's |" in card
    assert "| Position scaling | yarn, factor 2 |" in card


def test_the_card_takes_what_every_evaluation_writes(trained: Path, tmp_path: Path) -> None:
    """The files themselves, from the commands themselves."""
    (tmp_path / "text.txt").write_text("words and words " * 20)
    text, options = ["--text", tmp_path / "text.txt"], []
    for name, *arguments in (
        ("ppl", *text, "--lengths", 64, "--text-tokens", 128),
        ("passkey", "--lengths", 300, "--cases", 2, "--new-tokens", 2),
        ("retrieval", "--tasks", "abcdigits,phonebook", "--lengths", 600, "--cases", 2),
        ("bits", *text),
    ):
        out = tmp_path / f"{name}.json"
        status, _, err = called("eval", name, trained, *arguments, "--out", out)
        assert status == 0, err
        options += ["--results", out]
    assert called("export", trained, *options[:-2], "--out", tmp_path / "hub")[0] == 0
    card = (tmp_path / "hub" / "README.md").read_text()
    assert re.findall("### (.*)", card) == [
        "Perplexity by window length (sliding, stride 64)",
        "Perplexity by window length (context cut to the training length, stride 16)",
        "Passkey accuracy by prompt length",
        "Retrieval accuracy by prompt length: abcdigits",
        "Retrieval accuracy by prompt length: phonebook",
    ]
    assert "nothing in the file ties" not in " ".join(card.split())
    status, _, err = called("export", trained, *options, "--out", tmp_path / "other")
    said = f"{out} must be of a kind that cards show, perplexity, passkey, retrieval, got bits; omit it"
    assert (status, err) == (2, f"farspan: {said}\n")


def test_the_card_of_a_converted_model_names_its_original(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--owner--small-llama" / "snapshots" / "0a1b"
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**shape, vocab_size=257)).save_pretrained(snapshot)
    load_tokenizer("bytes").save(snapshot)
    convert_folder(snapshot, tmp_path / "cached", "coca-exact")
    copytree(snapshot, tmp_path / "small_llama")
    convert_folder(tmp_path / "small_llama", tmp_path / "local", "coca-exact")
    for source, options, named, linked in (
        ("cached", [], "owner/small-llama", "owner/small-llama"),
        ("local", [], "small_llama", None),
        ("local", ["--base-model", "mine"], "mine", "mine"),
        ("small_llama", [], "small_llama", None),
    ):
        out = tmp_path / f"{source}{len(options)}-exported"
        assert called("export", tmp_path / source, *options, "--out", out)[0] == 0
        _, front, card = (out / "README.md").read_text().split("---\n", 2)
        assert f"started from `{named}`." in card
        assert safe_load(front).get("base_model") == linked
        assert str(tmp_path) not in card


def test_a_card_without_results_says_so(trained: Path, tmp_path: Path) -> None:
    assert called("export", trained, "--out", tmp_path / "hub", "--dtype", "bfloat16")[0] == 0
    assert "Nothing has been measured." in (tmp_path / "hub" / "README.md").read_text()
    assert from_pretrained(tmp_path / "hub", None).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([[perplexity(512, 20.0, variant="a")], [perplexity(512, 20.0, "ntk-4", variant="b")]], "about one model"),
        ([[{"loss": 1.0}]], "perplexity, passkey, retrieval, got None; omit it"),
        ([None], "which is none"),
    ],
)
def test_results_that_cannot_be_right_raise(files: list[Any], message: str, trained: Path, tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.json" for i, _ in enumerate(files)]
    for path, rows in zip(paths, files, strict=True):
        if rows is not None:
            result(path, rows)
    options = [part for path in paths for part in ("--results", path)]
    status, _, err = called("export", trained, "--out", tmp_path / "hub", *options)
    assert status == 2
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "hub").exists()
