"""CoCA decoding on a CPU, one query on un-rotated t: it equals the equations and makes no table twice."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from farspan import FarspanCache, FarspanConfig, FarspanForCausalLM
from farspan.layers import Attention, AttentionSpec, LayerCache
from farspan.ops import DynamicNTK, Rotary, YaRN, coca, coca_attention, coca_attention_reference, coca_decode, explain
from farspan.ops.device import why_not_triton
from farspan.ops.masking import AttentionMask
from tests.helpers import coca_inputs

FORMS = ["exact", "slack"]


def inputs(m: int, **shape: int) -> tuple[torch.Tensor, ...]:
    return tuple(x.detach() for x in coca_inputs(1, m, **shape))  # type: ignore[arg-type]


def error(form: str, given: tuple[torch.Tensor, ...], rotary: Rotary | None, **options: object) -> float:
    """Return the largest difference from the equations, of a call that decode_cpu runs."""
    assert explain(coca_attention, *given, rotary=rotary, form=form, **options).name == "decode_cpu"
    got = coca_attention(*given, rotary=rotary, form=form, **options)  # type: ignore[arg-type]
    want = coca_attention_reference(*given, rotary=rotary, form=form, **options)  # type: ignore[arg-type]
    return float((got - want).abs().max())


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Record the number of positions of each table that is kept."""
    found: list[int] = []
    make = coca_decode.cos_sin
    monkeypatch.setattr(coca_decode, "cos_sin", lambda at, *rest: found.append(at.shape[-1]) or make(at, *rest))
    coca_decode._kept_table.cache_clear()
    yield found
    coca_decode._kept_table.cache_clear()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("positions", "bound"),
    [
        (2**31 - 50, 1e-6),  # float64 angles at 2³¹
        (-30, 1e-12),
        (torch.arange(20) * 1000 - 5000, 1e-12),
        ((torch.tensor([[11], [12]]), torch.arange(20)[None]), 1e-12),
        ((torch.tensor([[2], [12]]), torch.arange(3, 23)[None]), 1e-12),  # the first sees nothing
    ],
    ids=["far", "negative", "gaps", "a static cache", "before all keys"],
)
def test_equals_reference_at_any_positions(form: str, positions: object, bound: float) -> None:
    assert error(form, inputs(20, b=2), Rotary(8), positions=positions) <= bound


@pytest.mark.parametrize("form", FORMS)
def test_tables_are_kept_from_step_to_step_until_the_sequence_has_doubled(form: str, made: list[int]) -> None:
    q, t, v = inputs(70)
    for m in range(33, 71):
        assert error(form, (q, t[:, :, :m], v[:, :, :m]), Rotary(8)) <= 1e-12
    assert made == [64, 128]


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_left_padded_sequences_keep_their_tables_from_step_to_step(form: str, made: list[int]) -> None:
    config = FarspanConfig.preset("tiny", num_hidden_layers=2, attention=f"coca-{form}")
    model, cache = FarspanForCausalLM(config).eval().double(), FarspanCache(config)
    ids = torch.randint(0, 512, (2, 30))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    model(ids[:, :20], attention_mask=mask[:, :20], past_key_values=cache)
    assert made == []
    for i in range(20, 30):
        logits = model(ids[:, i : i + 1], attention_mask=mask[:, : i + 1], past_key_values=cache).logits[:, -1]
    assert made == [32]  # at the first step
    alone = torch.cat((model(ids[:1]).logits[:, -1], model(ids[1:, 5:]).logits[:, -1]))
    assert (logits - alone).abs().max() <= 1e-12


def test_positions_that_do_not_count_on_keep_no_table(made: list[int]) -> None:
    assert error("slack", inputs(8), Rotary(8), positions=10**6) <= 1e-9
    assert error("exact", inputs(8), Rotary(8), positions=torch.arange(8) * 10**6) <= 1e-9
    assert made == []


@pytest.mark.parametrize(
    "spec",
    [
        "coca-exact",
        "coca-strict",
        "coca-slack",
        {"kind": "coca", "form": "exact", "rotary": False},
    ],
    ids=str,
)
@torch.no_grad()
def test_decoding_makes_no_keys_of_width_d(spec: object, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = Attention(16, 4, AttentionSpec.parse(spec)).double(), torch.randn(2, 12, 16, dtype=torch.float64)
    out, cache = layer(x)[:, -1], LayerCache()
    layer(x[:, :-1], cache=cache)
    monkeypatch.setattr(coca, "coca_features", lambda *_, **__: pytest.fail("rotated keys were made"))
    assert (layer(x[:, -1:], cache=cache)[:, -1] - out).abs().max() <= 1e-12


@torch.no_grad()
def test_many_keys_stay_within_float16() -> None:
    q, t, v = torch.zeros(1, 1, 1, 8), torch.ones(1, 1, 40_000, 4), torch.full((1, 1, 40_000, 8), 3.0)
    assert (coca_attention(q.half(), t.half(), v.half(), rotary=Rotary(8)) == 3).all()


def test_fake_tensors_leave_no_table_behind() -> None:
    def call() -> torch.Tensor:
        q, t, v = torch.ones(1, 2, 1, 8), torch.ones(1, 2, 77, 4), torch.ones(1, 2, 77, 8)
        return coca_attention(q, t, v, rotary=Rotary(8, base=1234.0))

    with FakeTensorMode(), torch.no_grad():
        call()
    with torch.no_grad():
        assert (call() - 1).abs().max() <= 1e-6


def test_autocast_does_not_round_the_scores() -> None:
    q, t, v = torch.randn(1, 2, 1, 64) * 2, torch.rand(1, 2, 500, 32), torch.randn(1, 2, 500, 64)
    q, t, v = (x.bfloat16() for x in (q, t, v))
    plain = coca_attention(q, t, v, rotary=Rotary(64))
    with torch.autocast("cpu", torch.bfloat16):
        assert (coca_attention(q, t, v, rotary=Rotary(64)) - plain).abs().max() == 0


def test_threads_and_inference_mode_do_not_change_results() -> None:
    """What one call leaves behind must not be what another returns, nor be shared by two at once."""
    coca_decode._kept_table.cache_clear()
    calls = [[torch.randn(1, 2, 1, 8), torch.rand(1, 2, m, 4), torch.randn(1, 2, m, 8)] for m in (300, 40, 300, 500)]
    want = [coca_attention(*call, rotary=Rotary(8), backend="sdpa") for call in calls]
    with torch.inference_mode():
        first = coca_attention(*calls[0], rotary=Rotary(8))
    got = [first, *(coca_attention(*call, rotary=Rotary(8)) for call in calls[1:])]
    with ThreadPoolExecutor(4) as threads:
        several = list(threads.map(lambda call: coca_attention(*call, rotary=Rotary(8)), calls * 5))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got + several, want * 6, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_a_default_device_does_not_move_the_tables(form: str) -> None:
    coca_decode._kept_table.cache_clear()
    call = [torch.randn(1, 2, 1, 8), torch.rand(1, 2, 30, 4), torch.randn(1, 2, 30, 8)]
    with torch.device("meta"):
        out = coca_attention(*call, rotary=Rotary(8), form=form)
    assert torch.allclose(out, coca_attention(*call, rotary=Rotary(8), form=form, backend="sdpa"), atol=1e-6)


def cache_masks(b: int, m: int) -> dict[str, AttentionMask]:
    """Return masks of one query on a cache with m slots, by name."""
    lengths = torch.tensor([m, m - 7, 5])[:b]
    padding = torch.arange(m)[None] >= torch.arange(b)[:, None] * 3
    holes = padding & (torch.arange(m)[None] % 5 != 3)
    key = holes.long().cumsum(-1) - 1 + torch.tensor([[0], [900], [7]])[:b]
    last = lengths[:, None] - 1
    written = torch.arange(m)[None] < lengths[:, None]
    ranks = torch.arange(m)[None] - 3 * torch.arange(b)[:, None]
    cpu = torch.device("cpu")

    def mask(query: torch.Tensor, key: torch.Tensor, padding: torch.Tensor, **options: object) -> AttentionMask:
        return AttentionMask(1, m, cpu, first=None, positions=(query, key), aligned=False, padding=padding, **options)  # type: ignore[arg-type]

    return {
        "padding": AttentionMask(1, m, cpu, padding=padding),
        "padding, lengths": mask(
            ranks.gather(1, last), ranks, padding & written, lengths=lengths, firsts=lambda: ranks[:, 0]
        ),
        "positions": mask(key[:, -1:], key, holes),
        "positions, queries beyond": mask(key[:, -1:] + 13, key, holes, window=16),
        "positions, lengths": mask(key.gather(1, last), key, holes & written, lengths=lengths),
    }


@pytest.mark.parametrize("name", list(cache_masks(1, 9)))
@pytest.mark.parametrize(
    ("rotary", "group"),
    [
        (Rotary(8, scaling=YaRN(4, 8)), 1),
        (Rotary(8, scaling=DynamicNTK(4, 8)), 2),
        (Rotary(8, scaling=DynamicNTK(4, 8, "per_request")), 1),
        (None, 2),
    ],
    ids=["yarn", "ntk", "ntk per request", "nope"],
)
def test_a_cache_with_padding_and_positions_equals_each_row_alone(name: str, rotary: Rotary | None, group: int) -> None:
    """By every implementation that decodes; what slots hold beyond the length of their row must not matter."""
    q, t, v = inputs(20, b=3, h=group, g=1)
    options = {"rotary": rotary, "form": "slack"}
    mask = cache_masks(3, 20)[name]
    rows = []
    for row in range(3):
        keep = mask.block(0, 1, 0, 20).expand(3, -1, -1, -1)[row, 0, 0]
        query, key = (x.expand(3, -1)[row] for x in (mask.query_positions, mask.key_positions))
        if keep.any():
            given = q[row : row + 1], t[row : row + 1, :, keep], v[row : row + 1, :, keep]
            rows.append(coca_attention_reference(*given, **options, positions=(query, key[keep])))
        else:
            rows.append(torch.zeros_like(q[row : row + 1]))
    want = torch.cat(rows)
    assert want.abs().sum() > 1
    backends = ["auto", "sdpa", "reference"] + (["triton"] if why_not_triton("cpu") is None else [])
    for backend in backends:
        dtype = torch.float32 if backend == "triton" else torch.float64
        got = coca_attention(
            *(x.to(dtype) for x in (q, t, v)), **options, mask=cache_masks(3, 20)[name], backend=backend
        )
        assert (got - want).abs().max() <= (1e-12 if dtype == torch.float64 else 1e-5), backend
