"""Compiling many variants of a kernel at once, one process each, before a device's time is spent on any of them."""

import multiprocessing
import os
from collections.abc import Callable, Iterable
from typing import Any


def compile_ahead(function: Callable[..., Any], calls: Iterable[tuple[Any, ...]], *, workers: int | None = None) -> int:
    """Make every call in some other process, so that Triton's cache on disk has its kernels; how many went through.

    `function` is a module's, and calls are what its arguments are; a variant that cannot run is passed over here and
    reported where it is timed.

    >>> compile_ahead(divmod, [(7, 2), (7, 0)], workers=1)
    1
    """
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    with context.Pool(workers or max(1, (os.cpu_count() or 2) - 2)) as pool:
        return sum(pool.imap_unordered(_goes_through, [(function, call) for call in calls]))


def _goes_through(task: tuple[Callable[..., Any], tuple[Any, ...]]) -> bool:
    function, call = task
    try:
        function(*call)
    except Exception:
        return False
    return True
