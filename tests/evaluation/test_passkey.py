"""Passkey: answers are counted right."""

import pytest
import torch
from transformers.utils import logging

from farspan.evaluation import passkey
from farspan.utils import wilson
from tests.data.characters import Exact, Letters
from tests.models.small import make


class Oracle:
    """A model that answers right when the key is within its training length, wrong otherwise."""

    def __init__(self, reach: int) -> None:
        self.config, self.reach = make(train_length=reach).config, reach

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
    row = passkey(Oracle(300), Exact(), length=1000, cases=40, tokens_at_once=5000)
    assert row["cases"] == 40
    assert row["near"]["accuracy"] == 1.0
    assert row["far"]["accuracy"] == 0.0
    assert row["correct"] == row["near"]["cases"]
    assert row["ci95"][0] < row["accuracy"] < row["ci95"][1]
    assert sum(o["right"] for o in row["outcomes"]) == row["correct"]


def test_nobody_is_reminded_that_a_prompt_is_long(caplog: pytest.LogCaptureFixture) -> None:
    """transformers says it once per process for each number: hence two."""
    logger, level = logging.get_logger("transformers.generation.stopping_criteria"), logging.get_verbosity()
    logger.addHandler(caplog.handler)
    logging.set_verbosity_warning()  # another test may have set it lower
    try:
        passkey(make(dtype=torch.float32, max_position_embeddings=61), Letters(), length=300, cases=2, new_tokens=3)
        assert not caplog.messages
        ids = torch.ones(1, 300, dtype=torch.long)
        make(dtype=torch.float32, max_position_embeddings=62).generate(ids, max_new_tokens=3, pad_token_id=0)
        assert "exceeded the model's predefined maximum length (62)" in caplog.messages[0]
    finally:
        logger.removeHandler(caplog.handler)
        logging.set_verbosity(level)


@pytest.mark.parametrize("mode", ["per_query", "per_request"])
def test_reading_the_prompt_in_pieces_changes_no_answer(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(attention="coca-slack", rope_parameters={"rope_type": "dynamic", "factor": 4.0, "mode": mode})
    answers = []
    generate = model.generate

    def remember(*arguments, **options):
        answers.append(generate(*arguments, **options))
        return answers[-1]

    model.generate = remember
    for chunk in (300, 64, 7):
        monkeypatch.setattr("farspan.evaluation.answers.CHUNK", chunk)
        passkey(model, Letters(), length=300, cases=3, new_tokens=4)
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


def test_wilson_is_the_published_interval() -> None:
    low, high = wilson(8, 10)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert wilson(0, 20)[0] == 0.0
    assert 0 < wilson(0, 20)[1] < 0.2
