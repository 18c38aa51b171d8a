"""Passkey texts are what the paper shows, of exactly the length that was asked for."""

import re

import numpy as np
import pytest

from farspan.data.passkey import (
    ANSWER,
    check_prompt,
    check_row,
    make_case,
    make_cases,
    training_document,
    training_row,
)
from tests.data.characters import Exact


@pytest.mark.parametrize("length", [400, 512, 2000])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_prompt_has_exactly_its_length_and_hides_the_key_at_its_depth(length: int, depth: float) -> None:
    case = make_case(Exact(), length, 12345, depth)
    text = Exact().decode(case.prompt)
    assert len(case.prompt) == length
    assert text.startswith("There is an important info hidden")
    assert text.endswith("What is the passkey?")
    sentence = "The passkey is 12345. Remeber it. 12345 is the passkey.\n"
    assert text.count("12345") == 2
    assert length - (text.index(sentence) + len(sentence)) == case.distance


def test_cases_depend_on_the_seed_and_cover_all_depths() -> None:
    one, again, other = (make_cases(Exact(), 600, 20, seed) for seed in (1, 1, 2))
    assert one == again != other
    distances = sorted(case.distance for case in one)
    assert distances[0] < 60
    assert distances[-1] > 300
    assert len({case.key for case in one}) > 15


def test_half_of_the_long_training_rows_hold_several_texts_each_with_its_own_answer() -> None:
    counts = []
    for seed in range(60):
        row = training_row(Exact(), np.random.default_rng(seed), 12_000)
        assert len(row) == 12_000
        texts = Exact().decode(row.tolist()).split("There is an important info")[1:]
        for text in texts:
            key = text[-6:-1]
            assert text.endswith(ANSWER.format(key=key))
            assert text.count(f"{key} is the passkey.") == 1
        counts.append(len(texts))
    whole = sum(count == 1 for count in counts) / len(counts)
    assert 0.3 < whole < 0.7  # these have the far keys
    assert 2 < np.mean([count for count in counts if count > 1]) < 12


def test_a_short_training_row_is_one_document_that_ends_with_its_answer() -> None:
    row, document = (make(Exact(), np.random.default_rng(3), 1000) for make in (training_row, training_document))
    assert (row == document).all()
    assert len(document) == 1000
    text = Exact().decode(document.tolist())
    assert text.endswith(ANSWER.format(key=text[-6:-1]))
    assert text.count(text[-6:-1]) == 3


class Pieces(Exact):
    """Encodes numbers below 60 000 as one token, others as one token per digit."""

    def encode(self, text: str) -> list[int]:
        return super().encode(re.sub("[1-5][0-9]{4}", "0", text))


@pytest.mark.parametrize("tokenizer", [Exact(), Pieces()])
def test_lengths_that_pass_the_check_fit_whatever_the_key(tokenizer: Exact) -> None:
    check_prompt(tokenizer, 225, "--lengths")
    check_row(tokenizer, 246, "length")
    for key in (10_000, 59_999, 60_000, 99_999):
        assert len(make_case(tokenizer, 225, key, 0.5).prompt) == 225
    for seed in range(8):
        assert len(training_row(tokenizer, np.random.default_rng(seed), 246 + 1)) == 247
    with pytest.raises(ValueError, match=r"length must be at least 225 tokens .* got 224"):
        make_case(Exact(), 224, 12345, 0.5)
    with pytest.raises(ValueError, match=r"--lengths must be at least 225 tokens .* got 224; use a longer one"):
        check_prompt(tokenizer, 224, "--lengths")
    with pytest.raises(ValueError, match=r"length of stage x must be at least 246 tokens .* got 245; use longer rows"):
        check_row(tokenizer, 245, "length of stage x")
