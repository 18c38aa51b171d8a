"""The model card says what was measured, of which weights, and nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from yaml import safe_load

from farspan import FarspanForCausalLM
from farspan.convert import convert_folder, from_pretrained
from farspan.data import load_tokenizer
from tests.command_line import called
from tests.export.rows import bits, pairs, perplexity, result
from tests.models.small import MIXED, make


def test_the_card_holds_the_numbers_and_where_they_come_from(exported: Path) -> None:
    _, front, card = (exported / "README.md").read_text().split("---\n", 2)
    head = safe_load(front)
    assert head["license"] == "apache-2.0"
    assert head["pipeline_tag"] == "text-generation"
    assert {"farspan", "coca", "cosformer", "linear-coca"} <= set(head["tags"])
    assert "an experiment of farspan's own" in card
    assert "set_rope_parameters" not in card  # its dynamic NTK would be refused
    assert "| Scaling | 512 | 1,024 |" in card
    assert "| no scaling | 20.25 | 19.50 |" in card
    assert "| dynamic NTK 4 | — | 18.75 |" in card
    assert "| dynamic NTK 4 | 0.70 (95% 0.40–0.89) |" in card
    assert "context cut to the training length: 21.00." in card
    assert "`` farspan eval ppl `x` ``; CPU, commit abc" in card
    assert " ".join(card.split()).count("seed 0, torch 2; nothing in the file ties it to these weights") == 3
    assert "1 layer coca-exact (window 8), 1 layer rope, 1 layer coca-slack (without positions)" in card


def card_of(model: FarspanForCausalLM, folder: Path, *rows: dict[str, Any]) -> str:
    """The card of a model, with these results."""
    model.save_pretrained(folder / "model")
    load_tokenizer("bytes").save(folder / "model")
    options = ["--results", result(folder / "rows.json", list(rows))] if rows else []
    assert called("export", folder / "model", *options, "--out", folder / "hub")[0] == 0
    return (folder / "hub" / "README.md").read_text()


@pytest.mark.parametrize(
    ("rows", "line", "said"),
    [
        ([], 'rope_type="dynamic", factor=4.0', "not been measured for this model"),
        ([perplexity(512, 20.0)], 'rope_type="dynamic", factor=4.0', "not been measured for this model"),
        ([perplexity(512, 20.0, "ntk-8+log")], 'rope_type="dynamic", factor=4.0', "not been measured for this model"),
        ([perplexity(512, 20.0, "ntk-8")], 'rope_type="dynamic", factor=8.0', "is measured below"),
        ([bits(1.0) | {"scaling": "ntk-2/per_request"}], 'factor=2.0, mode="per_request"', "is measured below"),
    ],
)
def test_the_card_offers_dynamic_ntk_and_says_whether_it_was_measured(
    rows: list[dict[str, Any]], line: str, said: str, tmp_path: Path
) -> None:
    model = make([*MIXED, "alibi", "cosformer"], dtype=torch.float32, num_hidden_layers=5, vocab_size=257)
    card = card_of(model, tmp_path, *rows)
    assert f"{line})\n```" in card
    assert said in card
    assert "experiment" not in card


@pytest.mark.parametrize(
    ("layers", "offered"),
    [
        (["rope", {"kind": "linear-coca", "rotary": False}], True),  # only what turns can be in the way of a law
        (["rope", "linear-coca"], False),
        (["alibi", "cosformer"], False),
        ([{"kind": "rope", "rotary": False}, "cosformer"], False),
    ],
    ids=str,
)
def test_the_card_offers_dynamic_ntk_where_layers_turn_and_can_turn_by_it(
    layers: list[Any], offered: bool, tmp_path: Path
) -> None:
    model = make(layers, dtype=torch.float32, num_hidden_layers=2, vocab_size=257)
    assert ("model.set_rope_parameters" in card_of(model, tmp_path)) == offered
    if offered:
        model.set_rope_parameters(rope_type="dynamic", factor=4.0)


@pytest.mark.parametrize("law", ["linear", "dynamic", "yarn", "llama3"])
def test_the_card_of_a_model_with_a_law_of_its_own_leaves_it_alone(law: str, tmp_path: Path) -> None:
    """Another law in its place would change what the model computes inside its training length."""
    rope = {"rope_type": law, "rope_theta": 10_000.0, "factor": 2.0}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if law == "llama3" else {}
    model = make(MIXED, dtype=torch.float32, num_hidden_layers=len(MIXED), vocab_size=257, rope_parameters=rope)
    card = card_of(model, tmp_path, perplexity(512, 20.0, "ntk-4"))
    assert f'a law of its own, `"rope_type": "{law}"`, factor 2, and' in card
    assert "model.set_rope_parameters" not in card


def test_the_snippet_of_the_card_runs_as_it_stands_and_asks_nothing(tmp_path: Path) -> None:
    """Where farspan is not installed, transformers asks before it runs a folder's code, unless it was told."""
    make(MIXED, dtype=torch.float32, num_hidden_layers=len(MIXED), vocab_size=257).save_pretrained(tmp_path / "model")
    load_tokenizer("bytes").save(tmp_path / "model")
    out = tmp_path / "owner" / "toy"
    assert called("export", tmp_path / "model", "--name", "owner/toy", "--out", out)[0] == 0
    first, option = ((out / "README.md").read_text().split("```python\n")[i].split("```")[0] for i in (1, 2))
    snippet = first.replace("\nids =", f"\n{option}ids =")
    assert "set_rope_parameters" in option
    blocked = "import sys\nsys.modules['farspan'] = None\n" + snippet
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", blocked],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Once upon a time")
    assert "[y/N]" not in done.stdout


def test_the_card_takes_what_every_evaluation_writes(trained: Path, tmp_path: Path) -> None:
    """The files themselves, from the commands themselves."""
    (tmp_path / "text.txt").write_text("words and words " * 20)
    lines = [{"good": "a cat", "bad": "cat a", "set": f"s{i}", "field": field} for i, field in enumerate("fgf")]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    text, options = ["--text", tmp_path / "text.txt"], []
    for name, *arguments in (
        ("ppl", *text, "--lengths", 64, "--text-tokens", 128),
        ("passkey", "--lengths", 300, "--cases", 2, "--new-tokens", 2),
        ("bits", *text),
        ("pairs", "--pairs", tmp_path / "pairs.jsonl"),
    ):
        options += ["--results", tmp_path / f"{name}.json"]
        status, _, err = called("eval", name, trained, *arguments, "--out", options[-1])
        assert status == 0, err
    assert called("export", trained, *options, "--out", tmp_path / "hub")[0] == 0
    card = (tmp_path / "hub" / "README.md").read_text()
    (row,) = json.loads((tmp_path / "bits.json").read_text())["rows"]
    assert "| Scaling | bits per byte, windows of 64 | minimal pairs | f | g |" in card
    assert f"| no scaling | {row['bits_per_byte']:.3f} | " in card
    assert "320 bytes of 1 text; minimal pairs: 3; f: 2; g: 1." in card
    assert card.count("### ") == 3
    assert "nothing in the file ties" not in " ".join(card.split())


def test_minimal_pairs_stand_on_the_card_by_field_with_their_intervals(trained: Path, tmp_path: Path) -> None:
    """A field that an earlier result spells in two ways is one."""
    rows = [
        pairs("all", 150, 200),
        pairs("field", 60, field="syntax/semantics"),
        pairs("field", 90, field="syntax_semantics"),
        pairs("set", 60, field="syntax/semantics", set="one"),
    ]
    path = result(tmp_path / "pairs.json", rows)
    assert called("export", trained, "--results", path, "--out", tmp_path / "hub")[0] == 0
    card = (tmp_path / "hub" / "README.md").read_text()
    assert "| Scaling | minimal pairs | syntax\\_semantics |" in card
    assert "| no scaling | 0.750 (95% 0.686–0.805) | 0.750 (95% 0.686–0.805) |" in card


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
        ([[perplexity(512, 20.0)], [perplexity(512, 21.0)]], "measured before with another outcome"),
        ([[bits(1.0)], [bits(1.5)]], "none, 64 was measured before with another outcome"),
        ([[pairs("all", 9)], [pairs("all", 8)]], "none, all was measured before"),
        ([[pairs("all", 900)]], "correct must lie in 0 … cases, got 900 of 100"),
        ([[{"loss": 1.0}]], "give files of `farspan eval`"),
        ([[perplexity(512, 20.0, texts="two")]], "texts must be a whole number"),
        ([None], "which is none"),
    ],
)
def test_results_that_cannot_be_right_are_refused(
    files: list[Any], message: str, trained: Path, tmp_path: Path
) -> None:
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
