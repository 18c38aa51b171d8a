"""Minimal pairs and bits per byte: the sums are those of one sentence at a time, and every byte counts once."""

import json
import lzma
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from farspan import FarspanConfig, FarspanForCausalLM
from farspan.data import load_tokenizer
from farspan.evaluation.losses import bits_per_byte
from farspan.evaluation.pairs import Pair, log_probabilities, minimal_pairs, read_pairs
from tests.command_line import called

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
def test_log_probabilities_do_not_depend_on_the_batch(
    model: FarspanForCausalLM, tokens_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentences, read = [torch.randint(257, (n,)).tolist() for n in (7, 1, 12, 3, 12, 30)], list[torch.Size]()
    monkeypatch.setattr("farspan.evaluation.pairs.AT_ONCE", tokens_at_once)
    with model.model.embed_tokens.register_forward_pre_hook(lambda _, given: read.append(given[0].shape)):
        found = log_probabilities(model, sentences, 0)
    assert len(found) == sum(rows for rows, _ in read) == 6
    assert all(rows == 1 or rows * length <= tokens_at_once for rows, length in read)
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
        ("", "must hold at least one line, got none"),
        ("not json", r"p.jsonl:1 must be one JSON object per line"),
        ('{"good": "a"}', r"p.jsonl:1 must have a sentence under 'bad', got None"),
        ('{"good": " ", "bad": "b"}', "must have a sentence under 'good'"),
    ],
)
def test_bad_pairs_raise(line: str, message: str, tmp_path: Path) -> None:
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


def test_the_command_line_writes_both(model: FarspanForCausalLM, tmp_path: Path) -> None:
    saved(model, tmp_path)
    folder, pairs, text = tmp_path / "model", tmp_path / "pairs.jsonl.xz", tmp_path / "a.txt"
    pairs.write_bytes(lzma.compress(b'{"set": "s", "field": "f", "good": "a cat", "bad": "cat a"}\n' * 3))
    text.write_text("é" * 90)
    evaluated("pairs", folder, "--pairs", pairs, "--out", tmp_path / "o.json")
    assert [(row["kind"], row["cases"]) for row in found(tmp_path)] == [("all", 3), ("field", 3), ("set", 3)]
    evaluated("bits", folder, "--text", text, "--text-bytes", 101, "--out", tmp_path / "o.json", "--force")
    (row,) = found(tmp_path)
    assert (row["bytes"], row["length"]) == (100, 16)  # cut between characters
    result = json.loads((tmp_path / "o.json").read_text())
    assert (result["schema"], result["kind"], len(result["model_fingerprint"])) == (2, "bits", 64)
    assert result["command"].startswith(f"farspan eval bits {folder} --text {text} --text-bytes 101")
    error_of("--pairs must be a JSONL file", "pairs", folder, "--pairs", tmp_path / "none.jsonl")


def evaluated(*arguments: object) -> str:
    """Run `farspan eval`; return what it prints."""
    status, out, err = called("eval", *arguments)
    assert status == 0, err
    return out + err


def error_of(message: str, *arguments: object) -> None:
    status, _, err = called("eval", *arguments)
    assert status == 2
    assert message in err


def saved(model: FarspanForCausalLM, folder: Path) -> list[object]:
    """Save a model and a text; return the beginning of a command that measures its perplexity."""
    model.save_pretrained(folder / "model")
    TOKENIZER.save(folder / "model")
    (folder / "a.txt").write_text("words and words " * 20)
    return ["ppl", folder / "model", "--text", folder / "a.txt", "--lengths", 64, "--text-tokens", 128]


def found(folder: Path) -> list[dict[str, float]]:
    return json.loads((folder / "o.json").read_text())["rows"]


@pytest.mark.parametrize(("log", "name"), [(False, "dynamic_ntk-4"), (True, "dynamic_ntk-4+log")])
def test_ntk_means_what_it_meant_in_the_first_version(
    log: bool, name: str, model: FarspanForCausalLM, tmp_path: Path
) -> None:
    model.set_log_length(log)
    options = [*saved(model, tmp_path), "--force", "--out", tmp_path / "o.json"]
    evaluated(*options, "--ntk", 4)
    before = found(tmp_path)
    evaluated(*options, "--scaling", name)
    assert found(tmp_path) == before
    assert {row["scaling"] for row in before} == {name}
    error_of("exclude each other; give --scaling alone", *options, "--ntk", 4, "--scaling", "linear-4")


@pytest.mark.parametrize("log", [True, "step"])
def test_several_scalings_are_measured_in_turn_and_the_own_one_comes_back(
    log: bool | str, model: FarspanForCausalLM, tmp_path: Path
) -> None:
    model.set_rope_parameters(rope_type="yarn", factor=2.0)
    model.set_log_length(log)
    options = [*saved(model, tmp_path), "--out", tmp_path / "o.json", "--force"]
    evaluated(*options, "--scaling", "none,dynamic_ntk-4", "--scaling", "ntk-4,own,linear-4")
    rows = {row["scaling"]: row["nll"] for row in found(tmp_path) if row["mode"] == "sliding"}
    assert list(rows) == ["none", "dynamic_ntk-4", "ntk-4", "yarn-2+log", "linear-4"]
    assert len(set(rows.values())) == 5
    assert [row["scaling"] for row in found(tmp_path) if row["mode"] == "truncated"] == ["none"]
    for name, nll in rows.items():
        evaluated(*options, "--scaling", name.replace("yarn-2+log", "own"))
        assert found(tmp_path)[0]["nll"] == nll
    evaluated(*options)
    assert found(tmp_path)[0] == {**found(tmp_path)[0], "scaling": "yarn-2+log", "nll": rows["yarn-2+log"]}


def test_perplexity_needs_no_end_of_text_token(model: FarspanForCausalLM, tmp_path: Path) -> None:
    options = saved(model, tmp_path)
    tokenizer = tmp_path / "model" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|endoftext|>", "<strange>"))
    (tmp_path / "model" / "tokenizer_config.json").unlink()
    evaluated(*options)
    error_of("must have an end-of-text token", "bits", tmp_path / "model", "--text", tmp_path / "a.txt")


def test_a_tokenizer_larger_than_the_vocabulary_is_an_error(tmp_path: Path) -> None:
    given = saved(FarspanForCausalLM(FarspanConfig.preset("tiny", num_hidden_layers=1, vocab_size=100)), tmp_path)
    error_of("at most the model's vocab_size = 100 tokens, got 257", *given)


def test_every_text_is_looked_for_before_the_first_is_read(model: FarspanForCausalLM, tmp_path: Path) -> None:
    error_of("nowhere.txt", *saved(model, tmp_path), "--texts", 1, "--text", tmp_path / "nowhere.txt")


def test_a_task_that_does_not_fit_is_named_before_any_work(model: FarspanForCausalLM, tmp_path: Path) -> None:
    saved(model, tmp_path)
    for lengths in ("200,2000", "2000,200"):
        given = ["retrieval", tmp_path / "model", "--tasks", "abcdigits,cwe", "--lengths", lengths]
        error_of("length must leave space for task 'cwe', got 200; use a longer one", *given)


@pytest.mark.parametrize(
    ("sizes", "options", "texts", "control"),
    [
        ((14, 40, 30, 5), [], 2, True),
        ((14, 40, 30, 5), ["--texts", 1], 1, True),
        ((14, 40, 30, 5), ["--text-tokens", 12], 3, False),
        ((14, 10, 5), [], 2, False),
        ((14, 10, 5), ["--texts", 1], 1, False),
    ],
)
def test_texts_shorter_than_the_training_length_are_measured_without_the_control(
    sizes: tuple[int, ...],
    options: list[object],
    texts: int,
    control: bool,
    model: FarspanForCausalLM,
    tmp_path: Path,
) -> None:
    """Trained at 16. Of long and short documents only the long ones count, as the control needs them."""
    saved(model, tmp_path)
    text = tmp_path / "t.jsonl"
    text.write_text("\n".join(json.dumps({"text": ("some words " * 5)[:size]}) for size in sizes))
    given = ["ppl", tmp_path / "model", "--text", text, "--stride", 4, *options, "--out", tmp_path / "o.json"]
    said = evaluated(*given, "--lengths", 8)
    assert [row["mode"] for row in found(tmp_path)] == ["sliding", *(["truncated"] if control else [])]
    assert {row["texts"] for row in found(tmp_path)} == {texts}
    assert ("without the truncation control, whose texts need the training length" in said) == (not control)
    message = "--text must hold documents of at least 41 tokens, the longest of --lengths, got none that long"
    error_of(message, *given[:4], "--lengths", 41)
