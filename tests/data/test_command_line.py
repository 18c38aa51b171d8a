"""`farspan data` end to end."""

import lzma
from pathlib import Path

import pytest

from farspan.data import Shards, load_tokenizer
from tests.command_line import called
from tests.data.corpora import jsonl, texts


def test_text_becomes_shards(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", texts(80), field="body")
    packed = tmp_path / "a.jsonl.xz"
    packed.write_bytes(lzma.compress(source.read_bytes()))
    out = tmp_path / "out"
    options = ("--field", "body", "--train-tokenizer", 300, "--valid-share", 0.1, "--out", out)
    status, shown, error = called("data", packed, *options)
    assert (status, error) == (0, "")
    train, valid = Shards(out, verify=True), Shards(out, "valid", verify=True)
    assert len(train.document_lengths) + len(valid.document_lengths) == 80
    assert f"train: {train.tokens_total:,} tokens, {len(train.document_lengths)} documents" in shown
    assert load_tokenizer(out).decode(train.document(0)[:-1]) in texts(80)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"\xfd7zXZ\0 cut", [], "must be a complete .xz file"),
        (b"", ["--tokenizer", "x", "--train-tokenizer", "300"], "--tokenizer must be left out with --train-tokenizer"),
    ],
)
def test_bad_input_exits_2_with_one_line(content: bytes, options: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.xz").write_bytes(content)
    status, _, error = called("data", tmp_path / "a.jsonl.xz", *options, "--out", tmp_path / "out")
    assert status == 2
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
