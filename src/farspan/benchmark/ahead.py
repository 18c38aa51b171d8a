"""Compiling many variants of a kernel at once, before a device's time is spent on any of them."""

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from farspan.benchmark.agree import reason

Call = TypeVar("Call", bound=tuple[Any, ...])
PATIENCE = 300.0
"""Seconds that a call may take."""


def compile_ahead(
    function: Callable[..., Any], calls: Sequence[Call], *, workers: int | None = None
) -> tuple[list[Call], dict[Call, str]]:
    """Make every call of a module's function in a process of its own, so that Triton's cache on disk has its kernels.

    The calls that went through, and why the others did not: a kernel that reads beyond its memory, or a compiler that
    dies, takes nothing down but its own process.

    >>> compile_ahead(divmod, [(7, 2), (7, 0)], workers=1)
    ([(7, 2)], {(7, 0): 'ZeroDivisionError: integer division or modulo by zero'})
    """
    with ThreadPoolExecutor(workers or max(1, (os.cpu_count() or 2) - 2)) as pool:
        found = list(zip(calls, pool.map(partial(_alone, function), calls), strict=True))
    return [call for call, why in found if why is None], {call: why for call, why in found if why is not None}


def refused(bad: Mapping[tuple[Any, ...], str]) -> list[dict[str, Any]]:
    """Rows of a result about calls that did not go through, without their last argument, the device.

    >>> refused({("shape", "cut", "cuda"): "too large"})
    [{'kind': 'refused', 'call': ('shape', 'cut'), 'why': 'too large'}]
    """
    return [{"kind": "refused", "call": call[:-1], "why": why} for call, why in bad.items()]


def _alone(function: Callable[..., Any], call: tuple[Any, ...]) -> str | None:
    """Why a call in a new process failed; None if it did not."""
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(theirs, function, call), daemon=True)
    process.start()
    theirs.close()
    try:
        why: str | None = ours.recv() if ours.poll(PATIENCE) else f"took more than {PATIENCE:.0f} s"
    except EOFError:
        process.join()
        why = f"its process ended with code {process.exitcode}"
    process.kill()
    process.join()
    return why


def _tell(connection: Connection, function: Callable[..., Any], call: tuple[Any, ...]) -> None:
    try:
        function(*call)
    except Exception as error:
        connection.send(reason(error))
    else:
        connection.send(None)
