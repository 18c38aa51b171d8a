"""Loss by position and retrieval tasks: the definitions, and that a model which knows the answers gets them."""

import numpy as np
import pytest
import torch

from farspan import FarspanConfig, FarspanForCausalLM
from farspan.data import load_tokenizer
from farspan.data.retrieval import COUNTS, LINES, TASKS, TRAINED, retrieval_case, retrieval_row
from farspan.evaluation import loss_by_position, retrieval

TOKENIZER = load_tokenizer("bytes")


@pytest.fixture(scope="module")
def model() -> FarspanForCausalLM:
    torch.manual_seed(0)
    return FarspanForCausalLM(FarspanConfig.preset("tiny", num_hidden_layers=2, vocab_size=257, train_length=16)).eval()


def test_losses_by_position_are_those_of_one_pass_and_of_a_cut_context(
    model: FarspanForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farspan.evaluation.losses.CHUNK", 32)
    sequences = [torch.randint(0, 257, (70,)), torch.randint(0, 257, (40,))]
    rows = loss_by_position(model, sequences)
    assert [(row["start"], row["stop"]) for row in rows] == [(1, 16), (16, 32), (32, 64), (64, 70)]
    assert [row["tokens"] for row in rows] == [30, 32, 40, 6]
    losses = []
    for ids in sequences:
        with torch.no_grad():
            scores = model(ids[None]).logits[0, :-1].log_softmax(-1)
        losses.append(-scores.gather(1, ids[1:, None])[:, 0])
    expected = sum(loss[31:63].sum() for loss in losses)
    assert rows[2]["nll"] == pytest.approx(float(expected), rel=1e-4)
    cut = 0.0
    for begin, end, scored in ((52, 68, 4), (56, 70, 2)):  # windows of 16 with stride 4 score tokens 64 … 69
        with torch.no_grad():
            scores = model(sequences[0][None, begin:end]).logits[0, :-1].log_softmax(-1)
        cut -= float(scores.gather(1, sequences[0][begin + 1 : end, None])[-scored:].sum())
    assert rows[3]["control_nll"] == pytest.approx(cut, rel=1e-4)
    assert rows[0]["gain"] == pytest.approx(0, abs=1e-5)
    assert rows[2]["gain_ci95"][0] <= rows[2]["gain"] <= rows[2]["gain_ci95"][1]
    assert rows[3]["gain_ci95"] is None  # one block
    assert loss_by_position(model, sequences) == rows


@pytest.mark.parametrize("task", TASKS)
def test_prompts_have_the_wanted_length_and_hold_their_answers_once_before_the_question(task: str) -> None:
    for seed, depth in ((0, 0.0), (1, 1.0), (2, 0.4)):
        case = retrieval_case(TOKENIZER, task, 1600, np.random.default_rng(seed), depth)
        prompt = TOKENIZER.decode(case.prompt)
        assert len(case.prompt) == 1600
        if task in COUNTS:
            counts = {word: prompt.count(word) for word in case.answers}
            assert min(counts.values()) > 1
        else:
            assert all(answer in prompt for answer in case.answers)
            assert task in ("vt", "passkey") or prompt.count(case.answers[0]) == 1
    again = retrieval_case(TOKENIZER, task, 1600, np.random.default_rng(2), 0.4)
    assert again == case


@pytest.mark.parametrize("task", sorted(LINES))
def test_training_rows_end_with_answers_and_hold_no_number_of_a_test(task: str) -> None:
    row = TOKENIZER.decode(retrieval_row(TOKENIZER, np.random.default_rng(5), 1200, (task,)).tolist())
    text = LINES[task](np.random.default_rng(5), False)
    assert len(row) == 1200
    assert row.endswith("\n")
    assert text.questions
    for seed in range(20):
        tested = retrieval_case(TOKENIZER, task, 1200, np.random.default_rng(seed), 0.5).answers[0]
        assert task == "vt" or tested not in row
        if tested.isdigit():
            assert sum(map(int, tested)) % 10 == 0


def test_variable_chains_keep_their_order() -> None:
    for seed in range(30):
        case = retrieval_case(TOKENIZER, "vt", 700, np.random.default_rng(seed), 1.0)
        prompt = TOKENIZER.decode(case.prompt)
        at = [prompt.index(f"VAR {name} =") for name in case.answers]
        assert at == sorted(at)


def test_a_model_that_copies_the_answer_is_counted(model: FarspanForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second case is answered, by a `generate` that returns the text between the last key and the next line."""

    def generate(ids: torch.Tensor, **options: int) -> torch.Tensor:
        made = []
        for number, row in enumerate(ids.tolist()):
            prompt = TOKENIZER.decode(row)
            start = prompt.index(prompt[-2:]) + 2
            reply = prompt[start : start + 6] if number % 2 else "none"
            made.append(row + TOKENIZER.encode(reply.ljust(options["max_new_tokens"])))
        return torch.tensor(made)

    monkeypatch.setattr(model, "generate", generate)
    rows = retrieval(model, TOKENIZER, task="abcdigits", length=400, cases=20)
    assert (rows[0]["cases"], rows[0]["correct"], rows[0]["recall"]) == (20, 10, 0.5)
    assert [row["depth"] for row in rows[1:]] == [0.1, 0.3, 0.5, 0.7, 0.9]
    assert sum(row["correct"] for row in rows[1:]) == 10


def test_bad_lengths_and_names_are_named() -> None:
    random = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"length must be at least .* for task 'vt', got 90"):
        retrieval_case(TOKENIZER, "vt", 90, random, 0.5)
    with pytest.raises(ValueError, match="did you mean 'phonebook'"):
        retrieval_case(TOKENIZER, "phonbook", 900, random, 0.5)
    assert set(TRAINED) <= set(LINES)
