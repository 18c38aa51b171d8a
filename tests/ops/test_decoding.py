"""Whether the half-width kernel takes a call is decided once, with a reason; what it is told of a cache counts."""

from typing import Any

import pytest
import torch

from farspan.ops import DynamicNTK, Rotary, YaRN, coca_attention
from farspan.ops.coca import decoding
from farspan.ops.coca.decoding import FOLD_ROWS, Case, half_width_refusal, takes_half_width
from farspan.ops.coca.half_width import half_width_attention, half_width_attention_reference
from farspan.ops.coca.triton_backend import auto_takes_triton
from tests.helpers import coca_inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEP = Case(1, 4, 64, torch.bfloat16, torch.device("cuda"), gradient=False, documents=False)

needs_triton = pytest.mark.skipif(
    decoding.cannot_launch("cuda") is not None, reason="needs triton (pip install farspan[gpu])"
)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, and an assembler, as they were when the kernels were timed."""
    for name in ("is_hopper", "has_sound_wgmma"):
        monkeypatch.setattr(decoding, name, lambda *_: True)


@needs_triton
@pytest.mark.usefixtures("hopper")
def test_auto_takes_a_step_on_a_gpu() -> None:
    for backend in ("auto", "triton"):
        assert takes_half_width(STEP, backend)
        assert half_width_refusal(STEP, backend) is None
    assert not takes_half_width(STEP, "sdpa")
    assert not takes_half_width(STEP._replace(device=torch.device("cpu")), "auto")


@needs_triton
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("change", [{"dtype": torch.float16}, {"width": 96}, {"n": 3}], ids=str)
def test_auto_leaves_what_was_not_timed_to_those_who_ask(change: dict) -> None:
    case = STEP._replace(**change)
    assert not takes_half_width(case, "auto")
    assert "ask for" in str(half_width_refusal(case, "auto"))
    assert takes_half_width(case, "triton")


@needs_triton
@pytest.mark.parametrize(("missing", "alone"), [("is_hopper", False), ("has_sound_wgmma", True)])
@pytest.mark.usefixtures("hopper")
def test_auto_asks_for_the_gpu_and_the_assembler(missing: str, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One query a key head needs no tensor cores, hence no particular assembler."""
    monkeypatch.setattr(decoding, missing, lambda *_: False)
    assert not takes_half_width(STEP, "auto")
    assert takes_half_width(STEP._replace(group=1), "auto") is alone
    assert takes_half_width(STEP, "triton")


@needs_triton
@pytest.mark.usefixtures("hopper")
def test_a_gpu_that_could_decode_faster_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decoding, "has_sound_wgmma", lambda: False)
    decoding._tell.cache_clear()
    for _ in range(2):
        assert not takes_half_width(STEP, "auto", "decode_backend")
        assert not takes_half_width(STEP._replace(n=500), "auto")  # a prompt is no step that could be faster
        assert not takes_half_width(STEP._replace(device=torch.device("cpu")), "auto")
    (said,) = caplog.records
    assert "decode_backend='auto' decodes several queries a key head with ptxas 12.9 or later" in said.getMessage()


@needs_triton
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n": FOLD_ROWS // 4 + 1}, "more than 32 queries a key head are faster on ready keys"),
        ({"group": FOLD_ROWS + 1}, "more than 32 queries a key head are faster on ready keys"),
        ({"gradient": True}, "has no gradients; decode under torch.no_grad()"),
        ({"documents": True}, "does not see documents"),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_what_is_no_decoding_step_is_left_to_sdpa(change: dict, reason: str) -> None:
    case = STEP._replace(**change)
    assert not takes_half_width(case, "auto")
    assert not takes_half_width(case, "triton")
    assert reason in str(half_width_refusal(case, "triton"))
    assert takes_half_width(STEP._replace(n=FOLD_ROWS // 4), "triton")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float64}, r"takes float32, bfloat16 or float16, got torch\.float64; use backend='sdpa'"),
        ({"width": 257}, "takes heads up to 256 wide, got 257; use backend='sdpa'"),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_what_no_kernel_can_run_is_refused_by_triton_alone(change: dict, reason: str) -> None:
    assert not takes_half_width(STEP._replace(**change), "auto")
    with pytest.raises(ValueError, match=reason):
        takes_half_width(STEP._replace(**change), "triton")


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="backend must be one of 'auto', 'sdpa', 'triton', got 'tritn'"):
        takes_half_width(STEP, "tritn")


@needs_triton
def test_without_the_interpreter_a_cpu_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    from farspan.ops.triton import support

    monkeypatch.setattr(support, "INTERPRETED", False)
    with pytest.raises(ValueError, match=r"^backend='triton' needs CUDA tensors, got cpu; use backend='sdpa', or set"):
        takes_half_width(STEP._replace(device=torch.device("cpu")), "triton")


@needs_triton
def test_the_op_follows_the_same_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    q, t, v = (x.detach().float().to(DEVICE) for x in coca_inputs(1, 20))
    assert not auto_takes_triton(q, t, v, Rotary(8), None)
    monkeypatch.setattr(decoding, "_not_chosen", lambda *_: None)
    assert auto_takes_triton(q, t, v, Rotary(8), None)
    assert auto_takes_triton(q, t, v, None, None)
    assert not auto_takes_triton(q, t, v, Rotary(8).plan(0, 1, 20), None)
    assert not auto_takes_triton(q.clone().requires_grad_(), t, v, Rotary(8), None)
    taken, made = (coca_attention(q, t, v, rotary=Rotary(8), backend=backend) for backend in ("auto", "sdpa"))
    assert 0 < (taken - made).abs().max() <= 1e-5


def caches(b: int, m: int) -> dict[str, dict[str, Any]]:
    """What may be said of a cache of m slots, by name."""
    lengths = torch.tensor([m, m - 7, 5][:b])
    padding = torch.arange(m)[None] >= torch.arange(b)[:, None] * 3
    holes = padding & (torch.arange(m)[None] % 5 != 3)
    key = holes.long().cumsum(-1) - 1 + torch.tensor([[0], [900], [7]][:b])
    ends = lengths[:, None] - 1
    return {
        "padding": {"padding_mask": padding},
        "padding, lengths, first": {"padding_mask": padding, "lengths": lengths, "first": -3 * torch.arange(b)},
        "positions": {"positions": (key[:, -1:], key), "padding_mask": holes},
        "positions, queries beyond": {"positions": (key[:, -1:] + 13, key), "padding_mask": holes, "window": 6},
        "positions, lengths, window": {
            "positions": (key.gather(1, ends), key),
            "padding_mask": holes,
            "lengths": lengths,
            "window": 6,
        },
    }


@needs_triton
@pytest.mark.parametrize("name", list(caches(1, 9)))
@pytest.mark.parametrize(
    ("rotary", "group"),
    [(Rotary(8, scaling=YaRN(4, 8)), 1), (Rotary(8, scaling=DynamicNTK(4, 8)), 2), (None, 2)],
    ids=str,
)
def test_a_cache_with_padding_and_positions_equals_each_row_alone(name: str, rotary: Rotary | None, group: int) -> None:
    q, t, v = (x.detach().float().to(DEVICE) for x in coca_inputs(1, 20, b=3, h=group, g=1))
    options = {key: _to_device(value) for key, value in caches(3, 20)[name].items()}
    options |= {"rotary": rotary, "form": "slack"}
    want = half_width_attention_reference(q.double(), t.double(), v.double(), **options)
    assert (half_width_attention(q, t, v, **options) - want).abs().max() <= 1e-5
    assert (want - half_width_attention_reference(q.double(), t.double(), v.double(), rotary=rotary)).abs().max() > 1e-3


@needs_triton
@pytest.mark.parametrize("rows", [1, 2])
def test_positions_beyond_the_lengths_may_be_anything(rows: int) -> None:
    """A server writes them as texts grow; those before are still checked, in each row as far as it goes."""
    q, t, v = (x.detach().float().to(DEVICE) for x in coca_inputs(1, 6, b=2))
    lengths = torch.tensor([3, 4])
    key = torch.tensor([[0, 1, 2, 2, 0, -(2**40)], [3, 5, 7, 9, 0, 0]][:rows])
    places = key.gather(1, lengths[:rows, None] - 1)
    options = {"rotary": Rotary(8), "form": "slack", "lengths": lengths.to(DEVICE)}
    for op in (half_width_attention, half_width_attention_reference):
        got = op(q, t, v, positions=_to_device((places, key)), **options)
        ready = key.clone()
        ready[:, 4:] = 10
        assert torch.equal(got, op(q, t, v, positions=_to_device((places, ready)), **options))
        if DEVICE == "cpu":
            key[0, 2] = 0
            with pytest.raises(ValueError, match="positions must not decrease, got 1 then 0 in row 0"):
                op(q, t, v, positions=(places, key), **options)
            key[0, 2] = 2


def _to_device(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(x.to(DEVICE) for x in value)
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding_mask": torch.ones(1, 8)}, "padding_mask must be bool"),
        (
            {"padding_mask": torch.ones(1, 7, dtype=torch.bool)},
            r"padding_mask must have shape \(batch, keys\) = \(1, 8\)",
        ),
        (
            {"positions": (torch.arange(1), torch.arange(7))},
            r"positions\[1\] must give one position to each of the 8 keys",
        ),
        (
            {"positions": (torch.arange(1), torch.arange(8)), "first": 4},
            "first and positions both say where keys stand",
        ),
    ],
    ids=str,
)
def test_bad_words_about_keys_are_refused(options: dict, message: str) -> None:
    q, t, v = coca_inputs(1, 8)
    for op in (half_width_attention, half_width_attention_reference):
        with pytest.raises(ValueError, match=message):
            op(q, t, v, rotary=Rotary(8), **options)
