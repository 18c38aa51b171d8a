"""How the half-width kernels are cut into tiles and splits, and what that asks of the machine."""

import doctest
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")

from farspan.ops import device
from farspan.ops.coca_decode import FOLD_ROWS
from farspan.ops.triton import coca_decode, support
from farspan.ops.triton.coca_decode import Cut, choose_cut, choose_splits


def test_examples_in_the_kernels_run() -> None:
    assert doctest.testmod(sys.modules[choose_splits.__module__]) == (0, 2)
    assert doctest.testmod(support) == (0, 1)


def test_one_query_and_few_get_tiles_of_their_kernels() -> None:
    for rows in range(1, FOLD_ROWS + 1):
        for half in (4, 32, 64, 128):
            for dtype in (torch.bfloat16, torch.float32):
                taken = choose_cut(rows, half, 2 * half, dtype).rows
                assert (taken == 1) == (rows == 1)
                assert rows <= taken <= FOLD_ROWS


@pytest.mark.parametrize(("release", "sound"), [("12.8", False), ("12.9", True), ("13.0", True)])
def test_few_queries_have_four_warps_where_the_assembler_is_sound(
    release: str, sound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.backends.nvidia import compiler

    def get_ptxas(arch: int) -> SimpleNamespace:  # which tool it is has changed from release to release
        assert arch == 90
        return SimpleNamespace(version=release)

    monkeypatch.setattr(compiler, "get_ptxas", get_ptxas)
    monkeypatch.setattr(device, "assembler", device.assembler.__wrapped__)  # not what was found before
    assert (choose_cut(4, 64, 128, torch.bfloat16).warps == 4) is sound
    assert choose_cut(9, 64, 128, torch.bfloat16).warps == 2  # as they were checked on a GPU


def test_what_a_choice_asks_of_the_machine_is_a_constant_of_a_graph() -> None:
    def choice(x: Tensor) -> Tensor:
        can = device.has_sound_wgmma() + (device.why_not_triton("cuda") is None) + device.has_autocast("cpu")
        return x + device.is_hopper(None) + can

    x = torch.zeros(2)
    assert torch.equal(torch.compile(choice, fullgraph=True, backend="eager")(x), choice(x))
    assert device.has_autocast._dynamo_marked_constant  # type: ignore[attr-defined]  # which torch 2.13 does not need


def test_splits_grow_with_the_keys_and_stop_when_the_device_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = Cut(16, 64, 4, 3)
    assert choose_splits(1, 100, cut, 132) == 1
    assert choose_splits(32, 32_768, cut, 132) > choose_splits(256, 32_768, cut, 132) > 1
    assert choose_splits(10**6, 10**6, cut, 132) == 1
    monkeypatch.setattr(coca_decode, "has_sound_wgmma", lambda: True)
    cuts = [choose_cut(4, half, 2 * half, torch.bfloat16) for half in (32, 64)]
    assert [choose_splits(64, 32_768, cut, 132) for cut in cuts] == [8, 4]  # groups of four, eight sequences
