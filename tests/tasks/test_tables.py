"""Tables are complete, distinct between splits, and shuffled as a pure function of seed and step."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from farspan.data import Shards
from farspan.tasks.examples import SPLITS, MaskedRows, TableRows, chosen_texts, labelled_texts, make_tables
from tests.data.test_synthetic import evaluate
from tests.tasks.small import material, task


@pytest.fixture
def table(tmp_path: Path) -> Path:
    make_tables(tmp_path, lambda: iter([(split, np.arange(22).reshape(11, 2)) for split in SPLITS]))
    return tmp_path / "train.npy"


def test_numbers_that_do_not_fit_a_table_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must have tokens below 65536, got 70000"):
        make_tables(tmp_path, lambda: iter([("train", np.array([[70_000]]))]))


def test_every_epoch_has_every_row_once_in_another_order(table: Path) -> None:
    rows = TableRows(table, batch_size=4, seed=5)
    seen = torch.cat([rows.batch(step) for step in range(11)])[:, 0].tolist()  # four epochs
    epochs = [tuple(seen[i : i + 11]) for i in range(0, 44, 11)]
    assert all(sorted(epoch) == list(range(0, 22, 2)) for epoch in epochs)
    assert len(set(epochs)) == 4


def test_batches_depend_on_seed_and_step_alone(table: Path) -> None:
    rows = TableRows(table, batch_size=4, seed=5)
    late = rows.batch(9)
    rows.batch(0)
    assert torch.equal(TableRows(table, 4, 5).batch(9), late)
    assert torch.equal(rows.batch(9), late)
    assert torch.equal(torch.cat([rows.batch(9, rank, 2) for rank in range(2)]), late)
    assert not torch.equal(TableRows(table, 4, 6).batch(9), late)


@pytest.mark.parametrize("name", ["listops", "mqar", "text"])
def test_no_example_is_in_two_splits(name: str, tmp_path: Path) -> None:
    made = task(name, tmp_path)
    rows = {split: np.load(made.folder / f"{split}.npy") for split in SPLITS}
    keys = [row.tobytes() for split in SPLITS for row in rows[split]]
    assert len(set(keys)) == len(keys)
    if name == "listops":
        for row in rows["test"]:
            assert evaluate([int(token) for token in row[:-1] if token]) == row[-1]


def test_the_test_set_does_not_depend_on_how_much_is_trained_on(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    small, large = task("listops", tmp_path / "a", train=20), task("listops", tmp_path / "b", train=200)
    for split in ("valid", "test"):
        assert (small.folder / f"{split}.npy").read_bytes() == (large.folder / f"{split}.npy").read_bytes()


def write_labelled(path: Path, labels: list[int]) -> str:
    path.write_text("".join(json.dumps({"text": f"{path.stem} {i}", "label": x}) + "\n" for i, x in enumerate(labels)))
    return str(path)


def test_a_file_sorted_by_label_is_cut_to_both_labels_and_no_text_is_in_two_splits(tmp_path: Path) -> None:
    files = tuple(write_labelled(tmp_path / f"{name}.jsonl", [0] * 100 + [1] * 100) for name in SPLITS)
    found = chosen_texts(files, dict.fromkeys(SPLITS, 60))
    for rows in found.values():
        assert len(rows) == 60
        assert 15 <= sum(label for _, label in rows) <= 45
    again = chosen_texts(tuple(reversed(files)), dict.fromkeys(SPLITS, 60))
    assert again["test"] == found["train"]  # of the texts alone
    first = Path(files[2]).read_text().splitlines()[0]
    with Path(files[0]).open("a") as file:
        file.write(first + "\n")
    once = chosen_texts(files, dict.fromkeys(SPLITS, 1000))
    assert [len(once[split]) for split in SPLITS] == [200, 200, 200]  # a text in two files is in the test set only


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (([0, 0], [0], [0]), r"\[0\], \[0\] and \[0\]"),
        (([0, 1], [0, 1, 2], [0, 1]), r"\[0, 1\], \[0, 1, 2\] and \[0, 1\]"),
        (([0, 1], [0, 1], [1]), r"\[0, 1\], \[0, 1\] and \[1\]"),
    ],
)
def test_splits_with_other_labels_raise(labels: tuple[list[int], ...], said: str, tmp_path: Path) -> None:
    files = tuple(write_labelled(tmp_path / f"{n}.jsonl", x) for n, x in zip(SPLITS, labels, strict=True))
    with pytest.raises(ValueError, match=f"--labelled must have the same two labels or more .*, got {said}"):
        chosen_texts(files, dict.fromkeys(SPLITS, 60))


def test_masked_rows_ask_and_hide_as_bert_does(tmp_path: Path) -> None:
    source = next(iter(material(tmp_path).sources))
    shards, mask, n = Shards(source), 257, 200
    rows = MaskedRows([(shards, 1.0)], n, 100, 3, mask)
    seen, answers = rows.batch(4).chunk(2, dim=1)
    original = rows.text.batch(4)
    asked = answers > 0
    assert torch.equal(seen[~asked], original[~asked])
    assert torch.equal(answers[asked], original[asked])
    assert not (asked & (original == 0)).any()
    share = asked.float().mean().item()
    assert abs(share - 0.15) <= 4 * (0.15 * 0.85 / asked.numel()) ** 0.5
    hidden, kept = (seen[asked] == mask).float().mean().item(), (seen[asked] == answers[asked]).float().mean().item()
    spread = 4 * (0.8 * 0.2 / int(asked.sum())) ** 0.5
    assert abs(hidden - 0.8) <= spread
    assert abs(kept - 0.1 - 0.1 / 256) <= spread
    assert ((seen[asked] > 0) & (seen[asked] <= mask)).all()
    halves = torch.cat([rows.batch(4, rank, 2) for rank in range(2)])
    assert torch.equal(halves, torch.cat([seen, answers], dim=1))


@pytest.mark.parametrize(
    "line",
    ["not json", '{"text": "", "label": 0}', '{"text": "x"}', '{"text": 3, "label": 0}', '{"text": "x", "label": -1}'],
)
def test_lines_that_are_not_labelled_texts_raise(line: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"text": "good", "label": 1}) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"bad.jsonl:2 must .*; repair it"):
        list(labelled_texts(str(path)))
