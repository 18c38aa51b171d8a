"""Minimal pairs and bits a byte: the sums are those of one sentence at a time, and every byte counts once."""

import json
import lzma
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import farspan_cli
from farspan import FarspanConfig, FarspanForCausalLM
from farspan.data import load_tokenizer
from farspan.evaluation.bits import bits_per_byte, first_bytes
from farspan.evaluation.pairs import Pair, log_probabilities, minimal_pairs, read_pairs

SIZES = {"vocab_size": 257, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "train_length": 16, "initializer_range": 0.5}
TOKENIZER = load_tokenizer("bytes")


@pytest.fixture
def model() -> FarspanForCausalLM:
    return FarspanForCausalLM(FarspanConfig(attention="coca-exact", **SIZES)).eval()  # type: ignore[arg-type]


@torch.no_grad()
def by_hand(model: FarspanForCausalLM, ids: list[int], start: int = 0) -> float:
    """log p of a sequence, alone, token by token."""
    whole, total = torch.tensor([[start, *ids]]), 0.0
    for i in range(len(ids)):
        total += float(F.log_softmax(model(whole[:, : i + 1]).logits[0, -1].double(), -1)[ids[i]])
    return total


@pytest.mark.parametrize("tokens_at_once", [1, 40, 10_000])
def test_log_probabilities_do_not_depend_on_the_batch(model: FarspanForCausalLM, tokens_at_once: int) -> None:
    sentences = [torch.randint(257, (n,)).tolist() for n in (7, 1, 12, 3, 12, 30)]
    found: dict[int, float] = {}
    for batch in log_probabilities(model, sentences, 0, tokens_at_once=tokens_at_once):
        assert len(batch) == 1 or len(batch) * max(len(sentences[i]) for i in batch) <= tokens_at_once
        found |= batch
    assert sorted(found) == list(range(6))
    for number, ids in enumerate(sentences):
        assert found[number] == pytest.approx(by_hand(model, ids), rel=1e-5)


def test_rows_count_the_pairs_whose_good_sentence_is_likelier(model: FarspanForCausalLM) -> None:
    words = ["the cat", "a dog sat", "no", "yes and no", "x y z", "some more text"]
    pairs = [
        Pair(good, bad, f"s{i % 2}", "syntax" if i % 3 else "other")
        for i, (good, bad) in enumerate(zip(words, words[::-1], strict=True))
    ]
    rows = minimal_pairs(model, pairs, TOKENIZER.encode, start=0)
    right = [by_hand(model, TOKENIZER.encode(p.good)) > by_hand(model, TOKENIZER.encode(p.bad)) for p in pairs]
    assert (rows[0]["kind"], rows[0]["cases"], rows[0]["correct"]) == ("all", 6, sum(right))
    for name in ("s0", "s1"):
        mine = [ok for ok, pair in zip(right, pairs, strict=True) if pair.set == name]
        found = [row for row in rows if row["kind"] == "set" and row["set"] == name]
        assert sum(row["correct"] for row in found) == sum(mine)
        assert sum(row["cases"] for row in found) == len(mine) == 3
    fields = {row["field"]: row["cases"] for row in rows if row["kind"] == "field"}
    assert fields == {"other": 2, "syntax": 4}
    assert all(row["ci95"][0] <= row["accuracy"] <= row["ci95"][1] for row in rows)


def test_equal_sentences_are_not_right(model: FarspanForCausalLM) -> None:
    assert minimal_pairs(model, [Pair("same", "same")], TOKENIZER.encode, start=0)[0]["correct"] == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "must hold at least one pair, got none"),
        ("not json", r"p.jsonl:1 must be one JSON object a line"),
        ('{"good": "a"}', r"p.jsonl:1 must have a sentence under 'bad', got None"),
        ('{"good": " ", "bad": "b"}', "must have a sentence under 'good'"),
        ("[1]", "must be one JSON object a line"),
    ],
)
def test_bad_pairs_are_refused(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(line)
    with pytest.raises(ValueError, match=message):
        list(read_pairs(tmp_path / "p.jsonl"))


def test_a_field_that_the_data_spell_in_two_ways_is_one(model: FarspanForCausalLM, tmp_path: Path) -> None:
    lines = [
        {"good": "a", "bad": "b", "set": f"s{i}", "field": f"syntax{mark}semantics"} for i, mark in enumerate("_/")
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rows = minimal_pairs(model, read_pairs(tmp_path / "p.jsonl"), TOKENIZER.encode, start=0)
    assert [(row["field"], row["cases"]) for row in rows if row["kind"] == "field"] == [("syntax_semantics", 2)]
    assert [row["set"] for row in rows if row["kind"] == "set"] == ["s0", "s1"]


@pytest.mark.parametrize("length", [2, 7, 16, 1000])
def test_bits_count_every_byte_once(model: FarspanForCausalLM, length: int) -> None:
    texts = ["Où est la clé?", "x", "a longer text of some forty-two characters"]
    row = bits_per_byte(model, texts, TOKENIZER.encode, start=0, length=length)
    assert row["bytes"] == row["tokens"] == sum(len(text.encode()) for text in texts)
    assert row["bits_per_byte"] == pytest.approx(row["nll"] / row["bytes"] / math.log(2))
    if length == 1000:
        whole = -sum(by_hand(model, TOKENIZER.encode(text)) for text in texts)
        assert row["nll"] == pytest.approx(whole, rel=1e-5)


def test_a_model_that_knows_nothing_needs_eight_bits(model: FarspanForCausalLM) -> None:
    with torch.no_grad():
        model.lm_head.weight.zero_()
    row = bits_per_byte(model, ["any text at all"], TOKENIZER.encode, start=0, length=8)
    assert row["bits_per_byte"] == pytest.approx(math.log2(257), rel=1e-6)


def test_texts_are_cut_between_characters() -> None:
    assert first_bytes("é" * 10, 5) == "éé"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["farspan", "eval", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        farspan_cli.main()
    return int(stopped.value.code or 0)


def test_the_command_line_writes_both(
    model: FarspanForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, pairs, text = tmp_path / "model", tmp_path / "pairs.jsonl.xz", tmp_path / "a.txt"
    model.save_pretrained(folder)
    TOKENIZER.save(folder)
    pairs.write_bytes(lzma.compress(b'{"set": "s", "field": "f", "good": "a cat", "bad": "cat a"}\n' * 3))
    text.write_text("words and words " * 20)
    assert run(monkeypatch, "pairs", folder, "--pairs", pairs, "--out", tmp_path / "pairs.json") == 0
    rows = json.loads((tmp_path / "pairs.json").read_text())["rows"]
    assert [(row["kind"], row["cases"]) for row in rows] == [("all", 3), ("field", 3), ("set", 3)]
    assert run(monkeypatch, "bits", folder, "--text", text, "--text-bytes", 100, "--out", tmp_path / "bits.json") == 0
    (row,) = json.loads((tmp_path / "bits.json").read_text())["rows"]
    assert (row["bytes"], row["length"]) == (100, 16)
    capsys.readouterr()
    assert run(monkeypatch, "pairs", folder, "--pairs", tmp_path / "none.jsonl") == 2
    assert "--pairs must be a JSONL file" in capsys.readouterr().err


def test_the_command_line_stretches_by_one_law(
    model: FarspanForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model.save_pretrained(tmp_path / "model")
    TOKENIZER.save(tmp_path / "model")
    (tmp_path / "a.txt").write_text("words and words " * 20)
    options = ["ppl", tmp_path / "model", "--text", tmp_path / "a.txt", "--lengths", 64, "--text-tokens", 128]
    found = {}
    for name, extra in {
        "none": [],
        "yarn-4": ["--yarn", 4],
        "ntk-4": ["--ntk", 4],
        "ntk-4+log": ["--ntk", 4, "--log-length"],
    }.items():
        assert run(monkeypatch, *options, *extra, "--out", tmp_path / "o.json") == 0
        row = json.loads((tmp_path / "o.json").read_text())["rows"][0]
        assert row["scaling"] == name
        found[name] = row["nll"]
    assert len(set(found.values())) == 4
    assert run(monkeypatch, *options, "--ntk", 4, "--yarn", 4) == 2
    assert "--yarn must be left out with --ntk" in capsys.readouterr().err


def test_texts_shorter_than_the_training_length_are_measured_without_the_control(
    model: FarspanForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained at 16. Of long and short documents only the long ones count, as the control needs them."""
    model.save_pretrained(tmp_path / "model")
    TOKENIZER.save(tmp_path / "model")
    for name, sizes in {"short": (14, 10, 5), "mixed": (14, 40, 30, 5)}.items():
        lines = [json.dumps({"text": ("some words " * 5)[:size]}) for size in sizes]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    noted = "without the truncation control, whose texts need the training length of 16 tokens"
    for name, options, texts, control in (
        ("mixed", [], 2, True),
        ("mixed", ["--texts", 1], 1, True),
        ("mixed", ["--text-tokens", 12], 3, False),
        ("short", [], 2, False),
        ("short", ["--texts", 1], 1, False),
    ):
        out, text = tmp_path / "o.json", tmp_path / f"{name}.jsonl"
        given = ["ppl", tmp_path / "model", "--text", text, "--lengths", 8, "--stride", 4, *options, "--out", out]
        assert run(monkeypatch, *given) == 0
        rows = json.loads(out.read_text())["rows"]
        assert [row["mode"] for row in rows] == ["sliding", *(["truncated"] if control else [])]
        assert {row["texts"] for row in rows} == {texts}
        said = capsys.readouterr().out
        assert (noted in said) == (not control)
        assert (f"{noted}: --text-tokens cuts them to 12" in said) == ("--text-tokens" in options)
    assert run(monkeypatch, "ppl", tmp_path / "model", "--text", tmp_path / "short.jsonl", "--lengths", 15) == 2
    said = capsys.readouterr().err
    assert "--text must hold documents of at least 15 tokens, the longest of --lengths, got none that long in" in said


@pytest.mark.parametrize(
    ("rope", "name"),
    [
        ({"rope_type": "linear", "factor": 4.0}, "pi-4"),
        ({"rope_type": "yarn", "factor": 2.5}, "yarn-2.5"),
        ({"rope_type": "dynamic", "factor": 4.0, "mode": "per_request"}, "ntk-4/per_request"),
    ],
)
def test_rows_name_the_models_own_law_and_it_is_replaced_only_when_that_is_said(
    rope: dict, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = FarspanForCausalLM(FarspanConfig.preset("tiny", vocab_size=257, train_length=16, num_hidden_layers=1))
    model.set_rope_parameters(**rope)
    model.save_pretrained(tmp_path / "model")
    TOKENIZER.save(tmp_path / "model")
    (tmp_path / "a.txt").write_text("words and words " * 20)
    options = ["ppl", tmp_path / "model", "--text", tmp_path / "a.txt", "--lengths", 64, "--text-tokens", 128]
    found = {}
    for law, extra in {name: [], "none": ["--scaling", "none"], "ntk-8": ["--scaling", "none", "--ntk", 8]}.items():
        assert run(monkeypatch, *options, *extra, "--out", tmp_path / "o.json") == 0
        rows = json.loads((tmp_path / "o.json").read_text())["rows"]
        assert {row["scaling"] for row in rows} == {law}
        found[law] = rows[0]["nll"]
    assert len(set(found.values())) == 3
    bits = ["bits", tmp_path / "model", "--text", tmp_path / "a.txt", "--text-bytes", 50, "--out", tmp_path / "b.json"]
    assert run(monkeypatch, *bits) == 0
    assert json.loads((tmp_path / "b.json").read_text())["rows"][0]["scaling"] == name
    capsys.readouterr()
    assert run(monkeypatch, *options, "--yarn", 4) == 2
    said = capsys.readouterr().err
    assert f"got one with {name}; add --scaling none" in said
    assert said.count("\n") == 1
