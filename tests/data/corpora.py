"""Small corpora for the tests of data/."""

import json
import random
from pathlib import Path
from typing import Any

from farspan.data import documents

WORDS = ["the", "quick", "brown", "über", "naïve", "over", "λ", "lazy", "狗", "42", "sing\nnew", "", "lines\tand", "🐕"]


def texts(count: int, words: int = 60, seed: int = 0) -> list[str]:
    """Different texts with letters of one to four bytes; some are long, some short."""
    choose = random.Random(seed)
    return [f"{n} " + " ".join(choose.choices(WORDS, k=choose.randint(1, 2 * words))) for n in range(count)]


def jsonl(path: Path, documents: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"n": n, field: text}) + "\n" for n, text in enumerate(documents)))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def all_texts(sources: list[str]) -> list[str]:
    return [document.text for source in sources for document in documents(source)]


TEXTS = texts(300)
SMALL: dict[str, Any] = {"tokenizer": 300, "valid_share": 0.2, "shard_tokens": 2000}
"""Options of `prepare` that give several shards of both splits."""
