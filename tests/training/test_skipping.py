"""Short rows at far positions: where they may stand, and that the objectives put them there."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farspan.finetune.objectives import Distillation
from farspan.ops import DynamicNTK, Rotary
from farspan.ops.dispatch import _buckets
from farspan.ops.masking import make_mask
from farspan.training.pretraining import NextToken, skipped_positions
from tests.finetune.students import student, teacher


def drawn(seed: int, rows: int = 6, n: int = 32) -> torch.Tensor:
    return torch.randint(257, (rows, n), generator=torch.Generator().manual_seed(seed))


def far_ids() -> torch.Tensor:
    """Rows of 16 tokens and one more whose halves a reach of 8 takes apart."""
    found = (drawn(seed, 3, 17) for seed in range(100))
    return next(ids for ids in found if (skipped_positions(ids[:, :-1], 8)[:, 8] > 16).all())  # type: ignore[index]


@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 5))
def test_halves_stay_whole_and_the_second_ends_in_the_last_half_of_one_length(
    seed: int, pairs: int, doublings: int
) -> None:
    n, reach = 2 * pairs, 2**doublings
    positions = skipped_positions(drawn(seed, n=n), reach)
    assert positions is not None
    first, second = positions.chunk(2, dim=1)
    assert (first.diff(dim=1) == 1).all()
    assert (second.diff(dim=1) == 1).all()
    assert (first[:, -1] < second[:, 0]).all()
    (length,) = [n << k for k in range(doublings + 1) if (second >= n << k >> 1).all() and (second < n << k).all()]
    assert (first[:, 0] == 0).all() or (length > n and (first >= length // 2).all())


def test_every_length_and_every_distance_is_drawn() -> None:
    positions = torch.stack([skipped_positions(drawn(seed), 8) for seed in range(800)])  # type: ignore[misc]
    near, far = positions[..., 0], positions[..., 16]
    assert 150 < (positions == torch.arange(32)).all(-1).all(-1).sum() < 250
    for length in (64, 128, 256):
        mine = (far >= length // 2) & (far < length)
        assert 150 < mine[:, 0].sum() < 250
        assert 0.4 < (near[mine] == 0).double().mean() < 0.6
        between = {*range(16, length // 2 - 16 + 1), *range(length // 2, length - 16 + 1)}
        found = set((far - near)[mine].tolist())
        assert found <= between
        assert len(found) > 0.95 * len(between)
    assert (far.double().std(1) > 0).double().mean() > 0.6  # rows of a batch stand apart


@pytest.mark.parametrize(("n", "reach"), [(32, 16), (128, 4)])
def test_every_bucket_of_dynamic_ntk_is_met(n: int, reach: int) -> None:
    scaling = DynamicNTK(4.0, 32)
    met = {int(x) for seed in range(60) for x in scaling.buckets(skipped_positions(drawn(seed, n=n), reach)).unique()}  # type: ignore[arg-type]
    assert met == {32 << k for k in range(5)}


def test_under_per_query_ntk_all_batches_have_the_same_runs() -> None:
    """A compiled block would be compiled again for each new set of runs."""
    rotary = Rotary(8, scaling=DynamicNTK(4.0, 8))
    runs = []
    for seed in range(30):
        mask = make_mask(32, 32, len(drawn(seed)), torch.device("cpu"), positions=skipped_positions(drawn(seed), 16))
        runs.append([(start, start + part.n, member) for part, _, start, member in _buckets(rotary, mask)])
    assert sorted(set(map(tuple, runs))) == [((0, 8, None), (8, 16, None), (16, 32, None)), ((0, 32, None),)]


@pytest.mark.parametrize("weights", [{"logit-kl": 0.5, "next-token": 0.5}, {"logit-kl": 1.0}, {"next-token": 1.0}])
def test_the_student_stands_far_and_its_teacher_does_not(weights: dict[str, float]) -> None:
    original = teacher().double()
    model, ids = student(original), far_ids()
    positions = skipped_positions(ids[:, :-1], 8)
    ours = model(ids[:, :-1], position_ids=positions, use_cache=False).logits.log_softmax(-1)
    theirs = original(ids[:, :-1]).logits.log_softmax(-1)
    divergence = (theirs.exp() * (theirs - ours)).sum(-1).mean()
    own = -ours.gather(-1, ids[:, 1:, None]).mean()
    wanted = weights.get("logit-kl", 0) * divergence + weights.get("next-token", 0) * own
    alone: Any = weights == {"next-token": 1.0}
    objective = NextToken(model, reach=8) if alone else Distillation(model, original, weights, reach=8)
    near = NextToken(model) if alone else Distillation(model, original, weights)
    assert objective(ids).item() == pytest.approx(wanted.item(), rel=1e-12)
    assert abs(objective(ids).item() - near(ids).item()) > 1e-4


def test_attention_outputs_are_compared_at_the_students_far_positions() -> None:
    original = teacher().double()
    model, ids = student(original), far_ids()
    far, near = (Distillation(model, original, {"attention-output": 1.0}, reach=reach)(ids) for reach in (8, 1))
    assert abs(far.item() - near.item()) > 1e-4
