"""Text comes from a converted model as `generate` gives it."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from farspan.convert import from_pretrained
from farspan.convert.text import stream
from tests.convert.sources import with_tokenizer


def test_text_comes_in_pieces_and_is_what_generate_gives(tmp_path: Path) -> None:
    source = with_tokenizer(tmp_path)
    model, tokenizer = from_pretrained(source), AutoTokenizer.from_pretrained(source)
    prompt = tokenizer("some words", return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=30, do_sample=False, pad_token_id=0, eos_token_id=0)
    expected = tokenizer.decode(ids[0, prompt.input_ids.shape[1] :], skip_special_tokens=True)
    pieces = list(stream(source, "some words", max_new_tokens=30))
    assert "".join(pieces) == expected
    sampled = ["".join(stream(source, "some words", max_new_tokens=9, temperature=2.0, seed=s)) for s in (0, 0, 1)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_a_prompt_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    source = with_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="prompt must have at least one token"):
        list(stream(source, ""))
    with pytest.raises(ValueError, match="chat needs a tokenizer with a chat template"):
        list(stream(source, "a", chat=True))
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="must come with its tokenizer"):
        list(stream(source, "a"))


def test_settings_of_generate_come_along(tmp_path: Path) -> None:
    source = with_tokenizer(tmp_path)
    text = "".join(stream(source, "some words", max_new_tokens=12))
    ids = AutoTokenizer.from_pretrained(source)(text).input_ids
    settings = {"eos_token_id": [ids[5], 0], "temperature": 0.5, "top_p": 0.9, "do_sample": True}
    (source / "generation_config.json").write_text(json.dumps(settings))
    held = from_pretrained(source).generation_config
    assert (held.eos_token_id, held.temperature, held.top_p) == ([ids[5], 0], 0.5, 0.9)
    assert len("".join(stream(source, "some words", max_new_tokens=12))) < len(text)
