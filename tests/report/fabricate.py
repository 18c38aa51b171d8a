"""A made-up run folder that looks like a real one."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farspan.report.tables import Table
from farspan.utils import share


def ppl_row(variant: str, seed: int, scaling: str, length: int, ppl: float, mode: str = "sliding") -> dict[str, Any]:
    head = {"variant": variant, "seed": seed, "scaling": scaling, "length": length, "stride": 512, "mode": mode}
    return {**head, "nll": 1000 * math.log(ppl), "tokens": 1000, "texts": 4, "ppl": ppl}


def passkey_row(variant: str, seed: int, scaling: str, length: int, outcomes: list[tuple[int, bool]]) -> dict[str, Any]:
    head = {"variant": variant, "seed": seed, "scaling": scaling, "length": length}
    each = [{"distance": distance, "right": right} for distance, right in outcomes]
    return {**head, **share(sum(right for _, right in outcomes), len(outcomes)), "outcomes": each}


def train_row(variant: str, seed: int, length: int = 512) -> dict[str, Any]:
    losses = [[step, 3 + 6 * math.exp(-step / 200) + 0.02 * seed] for step in range(0, 1000, 20)]
    return {
        **{"variant": variant, "seed": seed, "parameters": 33_400_000, "tokens": 100_000_000, "steps": 1000},
        **{"length": length, "final_loss": losses[-1][1], "seconds": 900.0, "tokens_per_second": 111_111.0},
        **{"mfu": None if seed else 0.45, "passkey_share": 0.05, "retrieval_share": 0.12, "losses": losses},
    }


def position_rows(variant: str, seed: int = 0) -> list[dict[str, Any]]:
    """Bins of the loss by position: the second gains from the far context."""
    head = {"variant": variant, "seed": seed, "scaling": "none"}
    first = {"start": 1, "stop": 512, "nll": 1022.0, "tokens": 511, "control_nll": 1022.0, "gain": 0.0}
    second = {"start": 512, "stop": 1024, "nll": 512.0, "tokens": 512, "control_nll": 640.0, "gain": 0.25}
    return [{**head, **first, "gain_ci95": [0.0, 0.0]}, {**head, **second, "gain_ci95": [0.2, 0.3]}]


def retrieval_rows(variant: str, seed: int = 0, task: str = "phonebook", right: int = 3) -> list[dict[str, Any]]:
    """Two lengths, each in all and at two depths."""
    head = {"variant": variant, "seed": seed, "scaling": "none", "task": task}
    found = [(None, right + 1, 8), (0.1, 1, 4), (0.9, right, 4)]
    return [{**head, "length": n, "depth": d, **share(k, m)} for n in (512, 1024) for d, k, m in found]


def shown(table: Table) -> list[tuple[str, ...]]:
    """Each line of a table without its small print."""
    return [tuple(text.split("\n")[0] for text in line) for line in table.lines]


def small(text: str) -> str:
    """The small print of a text."""
    return "; ".join(text.split("\n")[1:])


def write(folder: Path, name: str, rows: list[dict[str, Any]], **replace: Any) -> Path:
    path = folder / "results" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"schema": 1, "command": "farspan reproduce --out run", "commit": "abc123", "device": "CPU, 2 cores"}
    path.write_text(json.dumps({**head, "versions": {"torch": "2.11"}, "seed": 0, "rows": rows, **replace}))
    return path


def fabricate(
    folder: Path,
    variants: Sequence[str] = ("rope", "coca-exact"),
    seeds: Sequence[int] = (0, 1),
    scalings: Sequence[str] = ("none", "ntk-4"),
) -> Path:
    """Write perplexities, passkeys and trainings at two lengths."""
    lengths, outcomes = (512, 1024), [(100, True), (500, False), (900, True)]
    for variant in variants:
        for seed in seeds:
            ppl = [ppl_row(variant, seed, scaling, 512, 20.0 + seed, "truncated") for scaling in scalings]
            ppl += [ppl_row(variant, seed, s, n, 20.0 + seed + n / 512) for s in scalings for n in lengths]
            write(folder, f"ppl-{variant}-{seed}", ppl)
            passkey = [passkey_row(variant, seed, s, n, outcomes) for s in scalings for n in lengths]
            write(folder, f"passkey-{variant}-{seed}", passkey)
            write(folder, f"train-{variant}-{seed}", [train_row(variant, seed)])
    return folder
