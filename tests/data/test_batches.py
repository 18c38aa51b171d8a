"""Batches depend on seed, step and row, and on nothing else."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from farspan.data import Batches, Shards, prepare
from tests.data.corpora import jsonl, texts


def make(folder: Path, documents: list[str], **options: Any) -> Shards:
    source = jsonl(folder.with_suffix(".jsonl"), documents)
    prepare([str(source)], folder, valid_share=0, **options)
    return Shards(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def books(folder: Path) -> Shards:
    return make(folder / "books", ["b" * (50 + n) for n in range(100)])


@pytest.fixture(scope="module")
def prose(folder: Path) -> Shards:
    """Text in which windows differ."""
    return make(folder / "prose", texts(300), shard_tokens=10_000)


def test_a_batch_is_a_pure_function_of_seed_step_and_row(prose: Shards) -> None:
    batches = Batches([(prose, 1)], 32, 8, seed=5)
    first = [batches.batch(step) for step in range(4)]
    assert first[0].shape == (8, 33)
    assert first[0].dtype == torch.int64
    again = Batches([(prose, 2.0)], 32, 8, seed=5)
    assert all(torch.equal(again.batch(step), first[step]) for step in (3, 1, 0, 2))
    assert torch.equal(Batches([(prose, 1)], 32, 16, seed=5).batch(2)[:8], first[2])
    rows = {tuple(row.tolist()) for batch in first for row in batch}
    assert len(rows) == 32
    assert not torch.equal(Batches([(prose, 1)], 32, 8, seed=6).batch(0), first[0])


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_any_number_of_processes_sees_the_same_global_batch(world: int, prose: Shards) -> None:
    batches = Batches([(prose, 1)], 20, 6, seed=0)
    assert torch.equal(torch.cat([batches.batch(7, rank, world) for rank in range(world)]), batches.batch(7))


def test_the_numbers_drawn_do_not_change_between_releases(prose: Shards) -> None:
    """A run must be repeatable years later: Philox's raw numbers are fixed, so the starts are too."""
    raw = np.random.Philox(key=np.array([5, 0], np.uint64), counter=[0, 0, 2, 9]).random_raw(3)
    start = int(raw[2]) * (prose.tokens_total - 32) >> 64
    assert np.array_equal(Batches([(prose, 1)], 32, 8, seed=5).row(9, 2), prose.window(start, 33))
    assert raw.tolist() == [15999832531796646581, 14769975630461477654, 3388833947238359650]


def test_every_window_can_be_drawn_the_last_token_included(prose: Shards) -> None:
    length = prose.tokens_total - 3
    batches = Batches([(prose, 1)], length, 1, seed=0)
    starts = {bytes(batches.row(step, 0)[:8]) for step in range(60)}
    assert starts == {bytes(prose.window(start, 8).astype(np.int64)) for start in range(3)}
    whole = Batches([(prose, 1)], prose.tokens_total - 1, 1, seed=0).row(0, 0)
    assert np.array_equal(whole, prose.window(0, prose.tokens_total))


def test_sources_are_mixed_by_weight(books: Shards, folder: Path) -> None:
    code = make(folder / "code", ["c" * (50 + n) for n in range(100)])
    batches = Batches([(books, 3), (code, 1)], 8, 100, seed=1)
    rows = torch.cat([batches.batch(step) for step in range(20)])
    share = (rows == ord("c") + 1).any(1).double().mean().item()
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / 2000) ** 0.5
    assert not ((rows == ord("c") + 1).any(1) & (rows == ord("b") + 1).any(1)).any()


def test_passkey_documents_replace_their_share_and_leave_other_rows_alone(prose: Shards) -> None:
    def passkey(random: np.random.Generator, length: int) -> np.ndarray:
        return np.concatenate([[0, 0, 0], random.integers(1, 257, length - 3)])

    plain = Batches([(prose, 1)], 40, 500, seed=2).batch(3)
    mixed = Batches([(prose, 1)], 40, 500, seed=2, passkey_share=0.1, passkey_document=passkey)
    rows = mixed.batch(3)
    special = (rows[:, :3] == 0).all(1)
    assert 20 <= special.sum() <= 90
    assert torch.equal(rows[~special], plain[~special])
    assert torch.equal(mixed.batch(3), rows)
    assert len({tuple(row) for row in rows[special].tolist()}) == special.sum()


def test_sources_that_do_not_fit_raise(books: Shards, tmp_path: Path) -> None:
    other = make(tmp_path / "other", texts(100), tokenizer=260)
    with pytest.raises(ValueError, match=r"tokenizer must be the same for all sources, got .*; prepare both with"):
        Batches([(books, 1), (other, 1)], 8, 2, seed=0)
    with pytest.raises(ValueError, match=r"length must be below the tokens available, got 1000000 for .*; choose a"):
        Batches([(books, 1)], 10**6, 4, seed=0)
