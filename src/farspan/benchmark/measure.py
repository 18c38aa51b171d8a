"""Alias until merged: what tests of other parts still import; it lives in tests/processes.py and farspan.bench."""

import multiprocessing
from types import SimpleNamespace
from typing import Any

from farspan.bench.timing import peak_bytes


def measure(call: Any, *, repeats: int, device: str) -> SimpleNamespace:
    return SimpleNamespace(peak_bytes=peak_bytes(call, device))


def in_fresh_process(function: Any, *arguments: Any) -> Any:
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        return pool.apply(function, arguments)
