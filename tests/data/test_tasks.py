"""Generated tasks follow their published specification, measured against exact probabilities."""

import math
from random import Random

import numpy as np
import pytest

from farspan.data.synthetic import END, IGNORED, MQAR, OPERATORS, POWER, TOKENS, ZERO, ListOps, evaluate

SMALL = ListOps(max_depth=4, max_args=5, min_length=6, max_length=40)


def depth_and_arguments(tokens: list[int]) -> tuple[int, set[int]]:
    """How deep operators nest, and every number of arguments that occurs."""
    deepest, counts, open_ = 0, set(), [0]
    for token in tokens:
        if TOKENS[token] in OPERATORS:
            open_.append(0)
            deepest = max(deepest, len(open_) - 1)
        elif token == END:
            counts.add(open_.pop())
            open_[-1] += 1
        else:
            open_[-1] += 1
    return deepest, counts


def length_distribution(task: ListOps) -> np.ndarray:
    """The exact probability of each length 0 … max_length - 1 before rejection; what is missing to 1 is longer.

    A node at the last depth has length 1. One level up, the generating function is
    P(x) = (1-p)·x + p·x²·Σ_k P_below(x)^k / (max_args - 1), k = 2 … max_args.
    """
    size = task.max_length
    below = np.zeros(size)
    below[1] = 1.0
    for _ in range(task.max_depth - 1):
        power, total = below, np.zeros(size)
        for _ in range(2, task.max_args + 1):
            power = np.convolve(power, below)[:size]
            total += power
        below = np.zeros(size)
        below[1] = 1 - task.operator_share
        below[2:] += task.operator_share / (task.max_args - 1) * total[:-2]
    return below


@pytest.mark.parametrize("task", [SMALL, ListOps()], ids=["small", "published"])
def test_listops_lengths_follow_the_exact_distribution(task: ListOps) -> None:
    """The share of accepted proposals and their mean length, each within four standard errors."""
    random, trials = Random(5), 3000
    proposals = [task.propose(random) for _ in range(trials)]
    lengths = np.array([len(p) for p in proposals if p is not None and len(p) > task.min_length])
    exact = length_distribution(task)
    kept = exact[task.min_length + 1 :]
    chance = float(kept.sum())
    assert abs(len(lengths) / trials - chance) <= 4 * math.sqrt(chance * (1 - chance) / trials)
    places = np.arange(task.min_length + 1, task.max_length)
    mean = float((kept * places).sum() / kept.sum())
    spread = math.sqrt(float((kept * (places - mean) ** 2).sum() / kept.sum()))
    assert abs(lengths.mean() - mean) <= 4 * spread / math.sqrt(len(lengths))


def test_the_exact_distribution_is_a_distribution() -> None:
    assert length_distribution(SMALL)[1] == 0.75
    short = ListOps(max_depth=2, max_args=3, min_length=0, max_length=10)
    assert length_distribution(short)[[1, 4, 5]].tolist() == [0.75, 0.125, 0.125]
    assert length_distribution(ListOps()).sum() < 1


def test_published_listops_expressions_keep_their_bounds() -> None:
    stream = ListOps().stream(seed=0)
    expressions = [next(stream) for _ in range(30)]
    for expression in expressions:
        assert 500 < len(expression.tokens) < 2000
        assert evaluate(expression.tokens) == expression.value
        deepest, counts = depth_and_arguments(expression.tokens)
        assert deepest <= 9
        assert counts <= set(range(2, 11))
    assert {count for e in expressions for count in depth_and_arguments(e.tokens)[1]} == set(range(2, 11))
    assert max(depth_and_arguments(e.tokens)[0] for e in expressions) == 9


def test_listops_are_distinct_and_repeatable() -> None:
    first, again = SMALL.stream(seed=7), SMALL.stream(seed=7)
    expressions = [next(first) for _ in range(500)]
    assert [next(again) for _ in range(500)] == expressions
    assert len({tuple(e.tokens) for e in expressions}) == 500
    assert next(SMALL.stream(seed=8)) != expressions[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[MIN 4 2 9 ]", 2),
        ("[MAX 4 [MIN 1 2 ] 3 ]", 4),
        ("[MED 1 9 2 ]", 2),
        ("[MED 1 2 ]", 1),  # 1.5 rounded down
        ("[SM 9 9 9 ]", 7),
        ("7", 7),
    ],
)
def test_listops_by_hand(text: str, value: int) -> None:
    assert evaluate([TOKENS.index(word) for word in text.split()]) == value


def test_half_an_expression_is_refused() -> None:
    with pytest.raises(ValueError, match="one complete expression"):
        evaluate([TOKENS.index("[MIN"), ZERO, ZERO])
    with pytest.raises(ValueError, match="one complete expression"):
        evaluate([ZERO, END])
    with pytest.raises(ValueError, match="lengths lie strictly between"):
        ListOps(min_length=10, max_length=11)


@pytest.mark.parametrize("task", [MQAR(), MQAR(length=256, pairs=64, vocabulary=512)])
def test_every_pair_is_shown_once_and_asked_once(task: MQAR) -> None:
    tokens, labels = task.draw(50, seed=1)
    half, shown = task.vocabulary // 2, 2 * task.pairs
    keys, values = tokens[:, 0:shown:2], tokens[:, 1:shown:2]
    assert ((keys > 0) & (keys < half)).all()
    assert ((values >= half) & (values < task.vocabulary)).all()
    for row in range(50):
        asked = np.flatnonzero(labels[row] != IGNORED)
        assert len(asked) == task.pairs
        assert asked.min() >= shown
        pairs = dict(zip(keys[row], values[row], strict=True))
        assert len(pairs) == task.pairs
        assert [pairs[key] for key in tokens[row, asked]] == labels[row, asked].tolist()
    again = task.draw(50, seed=1)
    assert (again.tokens == tokens).all()


def test_recall_gaps_follow_the_power_law() -> None:
    """With one pair, the place of the question is drawn with weight g^(power-1)."""
    task, examples = MQAR(length=34, pairs=1), 4000
    _, labels = task.draw(examples, seed=2)
    gaps = (np.argmax(labels != IGNORED, axis=1) - 2) // 2
    weights = np.arange(1, 17.0) ** (POWER - 1)
    expected = examples * weights / weights.sum()
    observed = np.bincount(gaps, minlength=16)
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    assert chi_square <= 37.7  # 15 degrees of freedom, one in a thousand


def test_impossible_recall_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 4 × pairs = 16, got 14"):
        MQAR(length=14, pairs=4)
    with pytest.raises(ValueError, match="pairs must be between 1 and the 3 keys"):
        MQAR(pairs=4, vocabulary=8)
