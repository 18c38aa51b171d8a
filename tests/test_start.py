"""The first commands of a new user."""

from importlib.metadata import version

import pytest
import torch

from farspan_cli import main
from tests.command_line import called


def test_doctor_names_versions_and_what_runs() -> None:
    status, out, err = called("doctor")
    assert status == 0
    assert not err
    assert f"torch {version('torch')}" in out
    for name in ("masked_kernel", "decode_", "chunked"):  # where they run, or why they do not
        assert name in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RecursionError("maximum recursion depth exceeded"), "nests too deep"),
        (MemoryError(), "out of memory"),
        (OverflowError("int too large to convert to float"), "a number is too large (int too large"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), "out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"), "out of memory"),
    ],
)
def test_what_no_check_foresaw_ends_in_one_line(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: str) -> None:
        raise error

    monkeypatch.setattr("farspan_cli.start.choices", fails)
    status, _, err = called("doctor")
    assert status == 2
    assert message in err
    assert len(err.splitlines()) == 1


def test_other_programming_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farspan_cli.start.choices", lambda _: torch.ones(2, 3) @ torch.ones(2, 3))
    monkeypatch.setattr("sys.argv", ["farspan", "doctor"])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        main()
