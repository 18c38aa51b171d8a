"""Results as `farspan eval` writes them, made up."""

import json
from pathlib import Path
from typing import Any


def result(path: Path, rows: list[dict[str, Any]], **changes: Any) -> Path:
    """A file as `farspan eval` writes it."""
    head = {"schema": 1, "command": "farspan eval", "commit": "abc", "versions": {"torch": "2"}, "device": "CPU"}
    path.write_text(json.dumps({**head, "seed": 0, "rows": rows, **changes}))
    return path


def perplexity(length: int, ppl: float, scaling: str = "none", mode: str = "sliding", **more: Any) -> dict[str, Any]:
    counts = {"stride": 512, "nll": 1.0, "tokens": 4096, "texts": 2}
    return {"length": length, "mode": mode, "scaling": scaling, "ppl": ppl, **counts, **more}


def passkey(length: int, correct: int, cases: int = 10) -> dict[str, Any]:
    share = {"cases": cases, "correct": correct}
    return {"length": length, "scaling": "ntk-4", **share, "near": share, "far": share, "outcomes": []}
