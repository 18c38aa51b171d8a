"""Passkey: prompts are what the paper shows, and answers are counted right."""

import logging
import re

import numpy as np
import pytest
import torch

from farspan.evaluation import wilson
from farspan.evaluation.passkey import (
    ANSWER,
    check_prompt,
    check_row,
    make_case,
    make_cases,
    passkey,
    training_document,
    training_row,
)
from tests.models.small import make


class Letters:
    """A tokenizer of one token a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) % 97 for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


class Exact:
    """One token a character, reversible."""

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))

    decode = Letters.decode


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


def test_a_short_training_row_is_one_text() -> None:
    row, document = (f(Exact(), np.random.default_rng(3), 1000) for f in (training_row, training_document))
    assert (row == document).all()


def test_a_training_document_ends_with_the_answer() -> None:
    document = training_document(Exact(), np.random.default_rng(0), 450)
    text = Exact().decode(document.tolist())
    assert len(document) == 450
    key = text[-6:-1]
    assert text.endswith(ANSWER.format(key=key))
    assert text.count(key) == 3


def test_a_prompt_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"length must be at least 225 tokens .* got 100"):
        make_case(Exact(), 100, 12345, 0.5)


class Pieces(Exact):
    """Writes numbers below 60 000 with one token, others with a token a digit."""

    def encode(self, text: str) -> list[int]:
        return super().encode(re.sub("[1-5][0-9]{4}", "0", text))


@pytest.mark.parametrize("tokenizer", [Exact(), Pieces()])
def test_what_is_not_refused_fits_whatever_the_key(tokenizer: Exact) -> None:
    check_prompt(tokenizer, 225, "--lengths")
    check_row(tokenizer, 246, "length")
    for key in (10_000, 59_999, 60_000, 99_999):
        assert len(make_case(tokenizer, 225, key, 0.5).prompt) == 225
    for seed in range(8):
        assert len(training_row(tokenizer, np.random.default_rng(seed), 246 + 1)) == 247
    with pytest.raises(ValueError, match=r"--lengths must be at least 225 tokens .* got 224; use a longer one"):
        check_prompt(tokenizer, 224, "--lengths")
    with pytest.raises(ValueError, match=r"length of stage x must be at least 246 tokens .* got 245; use longer rows"):
        check_row(tokenizer, 245, "length of stage x")


class Oracle:
    """A model that answers right when the key is near, wrong otherwise."""

    def __init__(self, reach: int) -> None:
        self.config, self.reach = make().config, reach

    def parameters(self):
        yield torch.zeros(1)

    def generate(self, prompts: torch.Tensor, *, max_new_tokens: int, **_: object) -> torch.Tensor:
        rows = []
        for prompt in prompts.tolist():
            text = Exact().decode(prompt)
            near = len(text) - text.index("is the passkey.") <= self.reach
            answer = text[text.index("is the passkey.") - 6 :][:5] if near else "00000"
            rows.append(prompt + Exact().encode(f" It is {answer}.".ljust(max_new_tokens)))
        return torch.tensor(rows)


def test_right_and_wrong_answers_are_counted_near_and_far() -> None:
    row = passkey(Oracle(300), Exact(), length=1000, cases=40, near=300, tokens_at_once=5000)
    assert row["cases"] == 40
    assert row["near"]["accuracy"] == 1.0
    assert row["far"]["accuracy"] == 0.0
    assert row["correct"] == row["near"]["cases"]
    assert row["ci95"][0] < row["accuracy"] < row["ci95"][1]
    assert sum(o["right"] for o in row["outcomes"]) == row["correct"]


def test_a_real_model_runs_the_task() -> None:
    row = passkey(make(dtype=torch.float32), Letters(), length=300, cases=3, new_tokens=4)
    assert (row["cases"], row["length"]) == (3, 300)


def test_only_here_nobody_is_reminded_that_a_text_is_long(caplog: pytest.LogCaptureFixture) -> None:
    """transformers says it once a process for each number: hence two."""
    logger = logging.getLogger("transformers.generation.stopping_criteria")
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.WARNING)
    try:
        passkey(make(dtype=torch.float32, max_position_embeddings=61), Letters(), length=300, cases=2, new_tokens=3)
        assert not caplog.messages
        ids = torch.ones(1, 300, dtype=torch.long)
        make(dtype=torch.float32, max_position_embeddings=62).generate(ids, max_new_tokens=3, pad_token_id=0)
        assert "exceeded the model's predefined maximum length (62)" in caplog.messages[0]
    finally:
        logger.removeHandler(caplog.handler)
        logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize("mode", ["per_query", "per_request"])
def test_reading_the_prompt_in_pieces_changes_no_answer(mode: str) -> None:
    model = make(attention="coca-slack", rope_parameters={"rope_type": "dynamic", "factor": 4.0, "mode": mode})
    answers = []
    generate = model.generate

    def remember(*arguments, **options):
        answers.append(generate(*arguments, **options))
        return answers[-1]

    model.generate = remember
    for chunk in (300, 64, 7):
        passkey(model, Letters(), length=300, cases=3, new_tokens=4, chunk=chunk)
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


def test_wilson_is_the_published_interval() -> None:
    low, high = wilson(8, 10)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert wilson(0, 20)[0] == 0.0
    assert 0 < wilson(0, 20)[1] < 0.2
