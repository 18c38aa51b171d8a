"""Flipped bits and two processes at once leave no wrong weights, no traceback and no half folder."""

import random
from collections import Counter
from pathlib import Path

import pytest

from farspan.checkpoints.convert import new_folder
from farspan.convert import convert_folder, from_pretrained
from tests.checkpoints.sources import random_model, saved, with_tokenizer
from tests.command_line import called

# Flipped bits


def read_with_flipped_bits(kind: str, folder: Path, count: int, seed: int = 0) -> Counter[str]:
    """Read a checkpoint `count` times, each with one bit flipped; return how often it was loaded and not."""
    path = folder / "source"
    if kind == "gguf":
        made = pytest.importorskip("tests.checkpoints.test_gguf")
        path.mkdir()
        made.write(
            path / "m.gguf", random_model("llama"), "llama", made.Q8_0, **{"a.list": [1, 2, 3], "words": ["a", "bc"]}
        )
    else:
        saved(path)
    if kind == "farspan":
        convert_folder(path, folder / "ours", "coca-exact")
        path = folder / "ours"
    shapes = {name: p.shape for name, p in from_pretrained(path, None).named_parameters()}
    files = [file for file in sorted(path.iterdir()) if file.suffix in (".safetensors", ".gguf", ".json")]
    drawn, outcomes = random.Random(seed), Counter[str]()
    for number in range(count):
        file = drawn.choice(files)
        intact = file.read_bytes()
        end = min(len(intact), 4096) if number % 2 else len(intact)  # half of them in the header
        damaged, place = bytearray(intact), drawn.randrange(end)
        damaged[place] ^= 1 << drawn.randrange(8)
        file.write_bytes(damaged)
        try:
            model = from_pretrained(path, None)
        except (ValueError, OSError):  # what the command line prints as one line
            outcomes["error"] += 1
        else:
            found = {name: p.shape for name, p in model.named_parameters()}
            assert found == shapes, f"{file.name}, byte {place}"
            assert all(p.isfinite().all() for p in model.parameters()), f"{file.name}, byte {place}"
            outcomes["loaded"] += 1
        file.write_bytes(intact)
    return outcomes


@pytest.mark.parametrize("kind", ["farspan", "safetensors", "gguf"])
def test_a_flipped_bit_raises_one_line_or_gives_finite_weights(kind: str, tmp_path: Path) -> None:
    outcomes = read_with_flipped_bits(kind, tmp_path, 20)
    assert outcomes["error"] > 0
    assert outcomes.total() == 20


# Two processes


@pytest.mark.parametrize("command", [("convert",), ("export",), ("export", "--as", "llama")], ids=str)
def test_a_second_process_is_told_that_the_folder_is_taken(command: tuple[str, ...], tmp_path: Path) -> None:
    source, out = with_tokenizer(tmp_path / "source"), tmp_path / "a" / "out"
    with new_folder(out):
        status, _, err = called(command[0], source, *command[1:], "--out", out)
    assert (status, err) == (2, f"farspan: another process works in '{out.parent}'; wait for it or choose another\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    assert called(command[0], source, *command[1:], "--out", out)[0] == 0
    assert [path.name for path in out.parent.iterdir()] == ["out"]
