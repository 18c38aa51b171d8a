"""One function over many items in several processes: results in order, whatever the number of processes."""

import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int, *, remedy: str
) -> Iterator[Result]:
    """Yield function(item) of each item in their order, from `workers` processes; 2 × workers items are begun ahead.

    torch's loader ends its processes whatever happens to this one. They are forked: the function must not hold threads
    or a GPU.

    Args:
        workers: 1 = this process.
        remedy: what to do when a process ends by itself, for the error that then says so.
    """
    if workers == 1:
        yield from map(function, items)
        return
    loader = DataLoader(
        _Calls(function),
        batch_size=None,
        sampler=items,
        num_workers=workers,
        collate_fn=lambda result: result,
        worker_init_fn=_leave_interrupts,
        multiprocessing_context="fork",
        generator=torch.Generator(),  # else it draws a seed from the global one
    )
    try:
        for result in loader:
            if isinstance(result, Exception):
                raise result
            yield result
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise OSError(
            f"workers must survive, got one of {workers} that ended by itself, perhaps out of memory; {remedy}"
        ) from error


class _Calls(Dataset[Any]):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __getitem__(self, item: Any) -> Any:
        try:
            return self._function(item)
        except Exception as error:  # the loader would put its own traceback into the message
            return error


def _leave_interrupts(_: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
