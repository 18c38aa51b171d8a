"""Compiling many variants of a kernel at once, before a device's time is spent on any of them."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Call = TypeVar("Call", bound=tuple[Any, ...])


def compile_ahead(
    function: Callable[..., Any], calls: Sequence[Call], *, workers: int | None = None
) -> tuple[list[Call], dict[Call, str]]:
    """Make every call of a module's function in a process of its own, so that Triton's cache on disk has its kernels.

    The calls that went through, and why the others did not: a kernel that reads beyond its memory takes nothing down
    but its own process.

    >>> compile_ahead(divmod, [(7, 2), (7, 0)], workers=1)
    ([(7, 2)], {(7, 0): 'ZeroDivisionError: integer division or modulo by zero'})
    """
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    with context.Pool(workers or max(1, (os.cpu_count() or 2) - 2), maxtasksperchild=1) as pool:
        reasons = pool.map(_reason, [(function, call) for call in calls], chunksize=1)
    found = list(zip(calls, reasons, strict=True))
    return [call for call, why in found if why is None], {call: why for call, why in found if why is not None}


def _reason(task: tuple[Callable[..., Any], tuple[Any, ...]]) -> str | None:
    function, call = task
    try:
        function(*call)
    except Exception as error:
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return None
