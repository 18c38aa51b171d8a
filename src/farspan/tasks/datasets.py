"""Generated and labelled examples as tables, one row an example: its tokens, padded, and then what is asked.

A classification row ends with its label. A recall row has, after its tokens, as many answers: 0 where nothing is
asked. The same settings always give the same tables; no example is in two splits.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farspan.data.listops import ListOps
from farspan.data.mqar import IGNORED, MQAR
from farspan.data.pathfinder import Pathfinder
from farspan.data.streams import opened
from farspan.errors import require
from farspan.pool import in_order
from farspan.tasks.settings import SPLITS
from farspan.tasks.tables import write_table

PIECE = 64
"""Examples made at once by one process."""
TRIES = 10
"""Times as many examples as wanted are made before a generator is said to have too few."""
Say = Callable[[str, float], None]


def listops_piece(task: ListOps, length: int, split: int, piece: int) -> NDArray[np.int64]:
    """Piece `piece` of a split: expressions, zeros up to `length`, value."""
    stream = task.stream(seed=split * 10**9 + piece)
    rows = np.zeros((PIECE, length + 1), np.int64)
    for row in rows:
        expression = next(stream)
        row[: len(expression.tokens)] = expression.tokens
        row[-1] = expression.value
    return rows


def pathfinder_piece(task: Pathfinder, length: int, split: int, piece: int) -> NDArray[np.int64]:
    """Piece `piece` of a split: pixels line by line, label."""
    images = [task.draw(split, index) for index in range(piece * PIECE, (piece + 1) * PIECE)]
    return np.stack([np.append(pixels.ravel().astype(np.int64), label) for pixels, label in images])


def recall_piece(task: MQAR, length: int, split: int, piece: int) -> NDArray[np.int64]:
    """Piece `piece` of a split: tokens, answers (0 = nothing asked)."""
    tokens, labels = task.draw(PIECE, seed=split * 10**9 + piece)
    return np.concatenate([tokens, np.where(labels == IGNORED, 0, labels)], axis=1)


Piece = Callable[[Any, int, int, int], NDArray[np.int64]]


def generate(folder: Path, piece: Piece, task: Any, length: int, examples: dict[str, int], say: Say) -> None:
    """Write train, valid and test tables of distinct examples; what is there already is left alone."""
    if all((folder / f"{split}.npy").is_file() for split in SPLITS):
        return
    seen: set[bytes] = set()
    for split in reversed(SPLITS):  # the test set first: it must not depend on how much is trained on
        kept, wanted, pieces = list[NDArray[Any]](), examples[split], 0
        while len(kept) < wanted:
            more = range(pieces, pieces + math.ceil((wanted - len(kept)) / PIECE))
            make, workers = partial(piece, task, length, SPLITS.index(split)), min(os.cpu_count() or 1, len(more))
            for rows in in_order(make, more, workers, remedy="free some memory and run the same command again"):
                for row in rows.astype(np.uint16):
                    if (key := row.tobytes()) not in seen and len(kept) < wanted:
                        seen.add(key)
                        kept.append(row)
                say(f"making {split} examples", len(kept) / wanted)
            require(
                pieces < TRIES * (1 + wanted // PIECE),
                f"the generator must have {sum(examples.values())} different examples, got {len(seen)}; ask for fewer",
            )
            pieces = more.stop
        write_table(folder / f"{split}.npy", np.stack(kept))


def labelled_texts(path: str) -> list[tuple[str, int]]:
    """(text, label) for each line ``{"text": …, "label": …}`` of a JSON-lines file, plain or compressed.

    Labels are whole numbers from 0.
    """
    file, found = Path(path), []
    require(
        file.is_file(), f"--labelled must name JSON-lines files, got {path!r}, which does not exist; check the path"
    )
    with opened(file) as (stream, _):
        for number, line in enumerate(stream, 1):
            try:
                record = json.loads(line)
                text, label = record["text"], record["label"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f'{path}:{number} must be an object with "text" and "label", got {line[:40]!r}; repair it'
                ) from error
            require(
                isinstance(text, str) and text != "" and type(label) is int and label >= 0,
                f"{path}:{number} must have a text and a label 0, 1, …, got {str(text)[:9]!r} and {label!r}; repair it",
            )
            found.append((text, label))
    require(bool(found), f"{path} must hold labelled texts, got none; name another file")
    return found


def chosen_texts(labelled: tuple[str, ...], examples: dict[str, int]) -> dict[str, list[tuple[str, int]]]:
    """So many (text, label) of each split's file, no text in two splits.

    Files are often sorted by label, so texts are ordered by their hash before they are cut: the choice depends on the
    texts alone, and has the labels in about the file's shares.
    """
    chosen, seen = dict[str, list[tuple[str, int]]](), set[str]()
    for split, path in reversed(list(zip(SPLITS, labelled, strict=True))):
        fresh = [(text, label) for text, label in dict(labelled_texts(path)).items() if text not in seen]
        seen |= {text for text, _ in fresh}
        fresh.sort(key=lambda pair: hashlib.sha256(pair[0].encode("utf-8", "surrogatepass")).digest())
        chosen[split] = fresh[: examples[split]]
        require(bool(fresh), f"{path} must hold texts that no other split has, got none; name another file")
    labels = {split: sorted({label for _, label in rows}) for split, rows in chosen.items()}
    require(
        len(labels["train"]) >= 2 and all(found == labels["train"] for found in labels.values()),
        "--labelled must have the same two labels or more in training, choices and test, got "
        f"{labels['train']}, {labels['valid']} and {labels['test']}; take more examples or name other files",
    )
    return chosen


def text_tables(
    folder: Path,
    labelled: tuple[str, ...],
    encode: Callable[[str], list[int]],
    pad: int,
    length: int,
    examples: dict[str, int],
    say: Say,
) -> None:
    """Write the tables of labelled texts, each cut to `length` tokens and padded on the right."""
    if all((folder / f"{split}.npy").is_file() for split in SPLITS):
        return
    for split, chosen in chosen_texts(labelled, examples).items():
        rows = np.full((len(chosen), length + 1), pad, np.int64)
        for i, (text, label) in enumerate(chosen):
            ids = encode(text)[:length]
            rows[i, : len(ids)], rows[i, -1] = ids, label
            say(f"encoding {split} texts", i / len(chosen))
        write_table(folder / f"{split}.npy", rows)
