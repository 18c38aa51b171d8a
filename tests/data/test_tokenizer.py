"""Tokenizers give text back unchanged, never fake an end, and keep their identity."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from farspan.data import TextTokenizer, load_tokenizer, train_bpe
from farspan.data import tokenizer as module
from tests.data.corpora import texts

BYTES = load_tokenizer("bytes")
TRAINED = train_bpe(texts(100), 300)


@pytest.mark.parametrize("tokenizer", [BYTES, TRAINED], ids=["bytes", "bpe"])
@settings(deadline=None, max_examples=60)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@example(text="a<|endoftext|>b")
def test_decode_undoes_encode_and_no_text_holds_the_end_token(tokenizer: TextTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.end == 0
    assert 0 not in ids


def test_bytes_are_bytes() -> None:
    assert BYTES.encode("aé") == [byte + 1 for byte in "aé".encode()]
    assert BYTES.vocab_size == 257
    text = bytes(range(128)).decode() + "éλ狗🐕"
    assert BYTES.encode(text) == BYTES._ids([text])[0].tolist()
    assert train_bpe([], 257).fingerprint == BYTES.fingerprint


def test_training_merges_what_is_frequent() -> None:
    assert TRAINED.vocab_size == 300
    assert len(TRAINED.encode(texts(1)[0])) < len(BYTES.encode(texts(1)[0])) / 2
    assert train_bpe(texts(100), 300).fingerprint == TRAINED.fingerprint
    assert train_bpe(texts(100), 301).fingerprint != TRAINED.fingerprint


def test_every_digit_is_a_token_of_its_own() -> None:
    numbers = train_bpe(["in 1843 and 1844, 1843 again"] * 50, 280)
    assert [numbers.decode([token]) for token in numbers.encode("1843")] == ["1", "8", "4", "3"]


def test_long_texts_are_cut_without_changing_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(texts(40)) + "\n\n  indented\n\tlines\n"
    whole = TRAINED._ids([text])[0].tolist()
    monkeypatch.setattr(module, "PIECE", 100)
    pieces = list(module.cut(text))
    assert len(pieces) > 10
    assert "".join(pieces) == text
    assert TRAINED.encode(text) == whole


def test_a_saved_tokenizer_is_the_same_everywhere(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    TRAINED.save(tmp_path)
    for loaded in (load_tokenizer(tmp_path), load_tokenizer(tmp_path / "tokenizer.json")):
        assert (loaded.fingerprint, loaded.end) == (TRAINED.fingerprint, TRAINED.end)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("the lazy fox").input_ids == TRAINED.encode("the lazy fox")
    assert theirs.eos_token_id == TRAINED.end


def test_a_truncation_in_tokenizer_json_does_not_cut_documents(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    TRAINED.save(tmp_path)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=2000)
    backend.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode(texts(1)[0]) == TRAINED.encode(texts(1)[0])
    assert loaded.fingerprint == TRAINED.fingerprint


def test_bad_tokenizers_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"vocab_size must be ≥ 257 .*got 256; try"):
        train_bpe(["a"], 256)
    with pytest.raises(ValueError, match=r"tokenizer must be 'bytes', .*got '.*gone\.json' \(no such file\)"):
        load_tokenizer(tmp_path / "gone.json")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer must be a tokenizer\.json, got"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer must be 'bytes', .*got 'no/such-name'"):
        load_tokenizer("no/such-name")
    TRAINED.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    with pytest.raises(ValueError, match=r"end-of-text token, got .* without <stop>"):
        load_tokenizer(tmp_path)
