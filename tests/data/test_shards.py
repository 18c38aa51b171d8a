"""Shards hold exactly the documents of their sources, and damage is found when they are opened."""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farspan.data import Shards, load_tokenizer, prepare
from farspan.data.prepare import split_of
from tests.data.corpora import SMALL, TEXTS, all_texts, contents, jsonl


def all_documents(folder: Path, split: str = "train") -> list[np.ndarray]:
    shards = Shards(folder, split)
    return [shards.document(i) for i in range(len(shards.document_lengths))]


def test_documents_come_back_whole_in_order_and_in_one_split(sources: list[str], expected: Path) -> None:
    tokenizer, found = load_tokenizer(expected), dict[str, list[str]]()
    for split in ("train", "valid"):
        shards, rows = Shards(expected, split, verify=True), all_documents(expected, split)
        assert all(row[-1] == tokenizer.end and tokenizer.end not in row[:-1] for row in rows)
        assert [len(row) for row in rows] == shards.document_lengths.tolist()
        assert np.array_equal(np.concatenate(rows), shards.window(0, shards.tokens_total))
        found[split] = [tokenizer.decode(row[:-1]) for row in rows]
    wanted = all_texts(sources)
    assert sorted(found["train"] + found["valid"]) == sorted(wanted)
    assert [text for text in wanted if text in set(found["train"])] == found["train"]
    assert 0.1 < len(found["valid"]) / len(wanted) < 0.3


def test_a_folder_of_something_else_is_kept(sources: list[str], tmp_path: Path) -> None:
    """Such as a model's, whose tokenizer would be replaced."""
    (tmp_path / "tokenizer.json").write_text("mine")
    message = r"out must be a new folder or one of the same tokens, got .* with 'tokenizer.json';"
    with pytest.raises(ValueError, match=message):
        prepare(sources, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_the_manifest_tells_where_every_token_came_from(sources: list[str], expected: Path) -> None:
    manifest = json.loads((expected / "manifest.json").read_text())
    assert [entry["source"] for entry in manifest["plan"]["sources"]] == sources
    assert [entry["bytes"] for entry in manifest["plan"]["sources"]] == [os.path.getsize(path) for path in sources]
    assert manifest["tokenizer"]["fingerprint"] == load_tokenizer(expected).fingerprint
    train = manifest["splits"]["train"]
    assert len(train["shards"]) > 3
    assert train["tokens"] == sum(shard["tokens"] for shard in train["shards"]) == Shards(expected).tokens_total
    assert all(shard["tokens"] >= 2000 for shard in train["shards"][:-1])
    shards = [shard for split in manifest["splits"].values() for shard in split["shards"]]
    names = {shard[key] for shard in shards for key in ("file", "index")}
    assert set(contents(expected)) == names | {"manifest.json", "tokenizer.json", "tokenizer_config.json", ".lock"}


def test_the_same_text_is_never_in_both_splits(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", TEXTS[:50] * 4)
    prepare([str(source)], tmp_path / "out", valid_share=0.5)
    rows = [all_documents(tmp_path / "out", split) for split in ("train", "valid")]
    train, valid = ({bytes(row) for row in split} for split in rows)
    assert train
    assert valid
    assert not train & valid
    assert sum(map(len, rows)) == 200


def test_the_tokenizer_is_trained_without_held_out_documents(tmp_path: Path) -> None:
    rare = [f"{n} " + "zyzzyva " * 50 for n in range(40)]
    held = [text for text in rare if split_of(text, 0.5) == "valid"]
    source = jsonl(tmp_path / "a.jsonl", held + [text for text in TEXTS if split_of(text, 0.5) == "train"])
    prepare([str(source)], tmp_path / "out", tokenizer=400, valid_share=0.5)
    assert len(load_tokenizer(tmp_path / "out").encode(" zyzzyva")) > 4


def test_wide_vocabularies_get_wide_tokens(sources: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer("bytes")
    monkeypatch.setattr(tokenizer, "vocab_size", 2**16 + 1)
    prepare(sources, tmp_path / "out", tokenizer=tokenizer, valid_share=0)
    row = all_documents(tmp_path / "out")[5]
    assert row.dtype == np.uint32
    assert row[:-1].tolist() == tokenizer.encode(TEXTS[5])
    with pytest.raises(ValueError, match=r"split 'valid' must hold documents, got none .* larger valid_share"):
        Shards(tmp_path / "out", "valid")
    with pytest.raises(ValueError, match="split must be one of 'train', 'valid', got 'vaild'; did you mean 'valid'"):
        Shards(tmp_path / "out", "vaild")


def test_finished_shards_are_returned_at_once_and_never_overwritten(sources: list[str], expected: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in expected.rglob("*")}
    assert prepare(sources, expected, **SMALL) == json.loads((expected / "manifest.json").read_text())
    with pytest.raises(ValueError, match=r"this folder began with tokenizer = .*, got .*; keep it or use another"):
        prepare(sources, expected, **(SMALL | {"tokenizer": "bytes"}))
    assert before == {path: path.stat().st_mtime_ns for path in expected.rglob("*")}


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_damaged_shards_are_named(suffix: str, expected: Path, tmp_path: Path) -> None:
    out = shutil.copytree(expected, tmp_path / "out")
    shard = out / f"train-00001.{suffix}"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    Shards(out)
    with pytest.raises(ValueError, match=rf"train-00001\.{suffix} must have sha256 .*; delete the folder"):
        Shards(out, verify=True)
    shard.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=rf"train-00001\.{suffix} must have {len(data)} bytes, got {len(data) - 1};"):
        Shards(out)
    shard.unlink()
    with pytest.raises(ValueError, match=rf"train-00001\.{suffix} must exist"):
        Shards(out)


def opened(folder: Path) -> list[Any]:
    """What training reads of a folder."""
    shards, tokenizer = Shards(folder, verify=True), load_tokenizer(folder)
    rows = [shards.window(0, shards.tokens_total).tobytes(), shards.document_lengths.tobytes()]
    return [*rows, shards.vocab_size, shards.end, shards.tokenizer_fingerprint, tokenizer.fingerprint, tokenizer.end]


def test_any_flipped_bit_is_one_clear_line_or_changes_nothing_that_training_reads(tmp_path: Path) -> None:
    """Every bit of shards, indices and tokenizer counts; a manifest also holds what only people read."""
    out, choose = tmp_path / "out", random.Random(0)
    prepare([str(jsonl(tmp_path / "a.jsonl", TEXTS[:40]))], out, valid_share=0, shard_tokens=4000)
    wanted, files = opened(out), sorted(path for path in out.iterdir() if path.name != ".lock")
    raised = list[str]()
    for flip in range(200):
        path = files[flip % len(files)]
        data = path.read_bytes()
        damaged, bit = bytearray(data), choose.randrange(8 * len(data))
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        os.utime(path, ns=(0, flip + 1))  # checksums are kept while a file has the same time
        try:
            assert opened(out) == wanted, f"{path.name}, bit {bit}"
            assert path.name in ("manifest.json", "tokenizer_config.json"), f"{path.name}, bit {bit}"
        except ValueError as error:
            raised.append(str(error))
        path.write_bytes(data)
        os.utime(path, ns=(0, 0))
    assert all(len(message.splitlines()) == 1 for message in raised)
    assert len(raised) > 170


def test_windows_cross_shards(expected: Path) -> None:
    shards = Shards(expected)
    everything = shards.window(0, shards.tokens_total)
    for start, length in ((0, 1), (1990, 50), (1, 6500), (shards.tokens_total - 3, 3), (shards.tokens_total, 0)):
        assert np.array_equal(shards.window(start, length), everything[start : start + length])
    for start, length in ((-1, 5), (0, shards.tokens_total + 1), (shards.tokens_total - 3, 4)):
        with pytest.raises(ValueError, match=r"window must lie within the .* tokens"):
            shards.window(start, length)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": []}, "sources must name at least one text"),
        ({"valid_share": 1.5}, "valid_share must be between 0 and 1, got 1.5"),
        ({"tokenizer": 99999999999}, "vocab_size must be ≥ 257 .* ≤ 1048576, got 99999999999"),
        ({"tokenizer": "nosuch"}, "tokenizer must be 'bytes', .* got 'nosuch'"),
    ],
)
def test_bad_arguments_raise(change: dict[str, Any], message: str, sources: list[str], tmp_path: Path) -> None:
    arguments = {"sources": sources} | change
    with pytest.raises(ValueError, match=message):
        prepare(arguments.pop("sources"), tmp_path / "new" / "out", **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["{", '{"schema": 1, "tokenizer": 3, "splits": {"train": 0}}'])
def test_a_damaged_manifest_is_one_line(damage: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(damage)
    with pytest.raises(ValueError, match=r"manifest\.json"):
        Shards(tmp_path)
