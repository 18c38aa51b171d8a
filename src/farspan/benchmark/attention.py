"""One attention layer's work on long texts: CoCA, RoPE and ALiBi, against the published CoCA formulation."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from farspan.benchmark.agree import ResultsDifferError, agree
from farspan.benchmark.clock import quantiles
from farspan.benchmark.measure import in_fresh_process, in_turn, measure
from farspan.benchmark.truth import as_timed, definition, wider
from farspan.configuration_farspan import FarspanConfig
from farspan.layers import AlibiAttention, Attention, CocaAttention, LayerCache, RopeAttention
from farspan.modeling_farspan import FarspanCache, FarspanForCausalLM
from farspan.ops import Rotary, alibi_attention, coca_attention, rope_attention
from farspan.ops.masking import make_mask

HEADS, WIDTH = 8, 64

LAYERS: dict[str, Callable[[], Attention]] = {
    "rope": lambda: RopeAttention(HEADS * WIDTH, HEADS),
    "coca-exact": lambda: CocaAttention(HEADS * WIDTH, HEADS, form="exact"),
    "coca-slack": lambda: CocaAttention(HEADS * WIDTH, HEADS, form="slack"),
    "coca-exact, window 512": lambda: CocaAttention(HEADS * WIDTH, HEADS, window=512),
    "alibi": lambda: AlibiAttention(HEADS * WIDTH, HEADS),
}

DECODERS = ("rope", "coca-exact", "coca-slack")
CHECKED = 4
"""Tokens compared at each of four positions of a sequence: the equations take N×d numbers for each."""
PREFILL_LENGTHS = (512, 2048)
DECODE_LENGTHS = (512, 2048, 8192)

CHECKS: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "rope": (rope_attention, {"rotary": Rotary(32)}),
    "coca-exact": (coca_attention, {"rotary": Rotary(32), "form": "exact"}),
    "coca-slack": (coca_attention, {"rotary": Rotary(32), "form": "slack"}),
    "coca-exact, window": (coca_attention, {"rotary": Rotary(32), "window": 50}),
    "alibi": (alibi_attention, {}),
}


def published_coca(q: Tensor, t: Tensor, v: Tensor, rotary: Rotary) -> Tensor:
    """Slack CoCA as its authors run it: a three-operand contraction, all N×N scores, full-width t (Eq. 18)."""
    n, width = q.shape[2], q.shape[3]
    angles = make_mask(n, n, q.shape[0], q.device).angles(rotary)
    keys = angles.rotate_keys(torch.cat((t, t), dim=-1))
    scores = torch.einsum("bhid,bhid,bhjd->bhij", angles.rotate_queries(q), q, keys) * width**-0.5
    causal = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    scores = torch.where(causal, scores, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1) @ v


def run(
    lengths: list[int], published_length: int, *, repeats: int, device: str, seed: int
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield (what was done, its rows) step by step; raise :class:`ResultsDifferError` before an untrue claim."""
    yield "fused against the equations, float64", [in_fresh_process(check, device, seed)]
    yield "cache bytes", [_cache_bytes()]
    for length in lengths:
        for name in LAYERS:
            yield f"{name} layer, {length} tokens", [in_fresh_process(_layer, name, length, repeats, device, seed)]
    for length in PREFILL_LENGTHS:
        yield f"reading {length} tokens", in_fresh_process(_prefill, length, 2 * repeats, device, seed)
    for length in DECODE_LENGTHS:
        yield f"one token after {length}", in_fresh_process(_decode, length, 10 * repeats, device, seed)
    row = in_fresh_process(_against_published, published_length, repeats, device, seed)
    yield f"published formulation, {published_length} tokens", [row]


def parts(lengths: list[int]) -> int:
    """How many steps :func:`run` yields.

    >>> parts([8192, 32_768])
    18
    """
    return 2 + len(lengths) * len(LAYERS) + len(PREFILL_LENGTHS) + len(DECODE_LENGTHS) + 1


def check(device: str, seed: int) -> dict[str, Any]:
    """Every contestant against its definition."""
    return agree(CHECKS, device, seed)


def _cache_bytes() -> dict[str, Any]:
    held = {}
    for name in ("rope", "coca-exact"):
        cache = LayerCache()
        with torch.no_grad():
            LAYERS[name]()(torch.randn(1, 128, HEADS * WIDTH), cache=cache)
        held[name] = cache.nbytes
    return {"kind": "cache", **held, "ratio": held["coca-exact"] / held["rope"]}


@torch.no_grad()
def _layer(name: str, length: int, repeats: int, device: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    layer, x = LAYERS[name]().to(device), torch.randn(1, length, HEADS * WIDTH, device=device)
    layer(x[:, :64])  # load kernels and start threads, which are not this layer's memory
    kept: dict[str, Tensor] = {}
    result = measure(lambda: kept.update(out=layer(x)), repeats=repeats, device=device)
    ends = [max(CHECKED, length * part // 3) for part in range(4)]
    out = torch.cat([kept["out"][:, end - CHECKED : end] for end in ends], dim=1)
    times = quantiles(result.seconds or [result.median])
    truth = torch.cat([_last_outputs(layer, x[:, :end]) for end in ends], dim=1)
    return {
        "kind": "layer",
        "attention": name,
        "length": length,
        "heads": HEADS,
        "head_dim": WIDTH,
        "seconds": result.seconds,
        "median": result.median,
        "low": times.low,
        "high": times.high,
        "peak_bytes": result.peak_bytes,
        **as_timed(f"{name} layer, {length} tokens", out, truth),
    }


def _last_outputs(layer: Attention, x: Tensor) -> Tensor:
    """Outputs (b, CHECKED, width) of the last tokens by the equations in float64; the layer is left in float64."""
    q, k, v = layer.double().project(x.double())
    out = definition(layer, q[:, :, -CHECKED:], k, v)
    projected: Tensor = layer.o_proj(out.transpose(1, 2).flatten(2))
    return projected


def _models(device: str, seed: int) -> dict[str, FarspanForCausalLM]:
    """Two layers of each kind."""
    models = {}
    for name in DECODERS:
        torch.manual_seed(seed)
        config = FarspanConfig(
            vocab_size=256, hidden_size=HEADS * WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, attention=name
        )
        models[name] = FarspanForCausalLM(config).eval().to(device)
    return models


class Text:
    """A text as it grows, in one model's cache, and the logits of its newest token."""

    def __init__(self, model: FarspanForCausalLM, ids: Tensor) -> None:
        self.model, self.ids = model, ids
        self.cache = FarspanCache(model.config)
        self.logits = torch.empty(0)

    def read(self) -> None:
        """The whole text into an empty cache."""
        self.cache = FarspanCache(self.model.config)
        self.logits = self.model(self.ids, past_key_values=self.cache, logits_to_keep=1).logits[:, -1]

    def step(self, token: Tensor) -> None:
        """One token more."""
        self.logits = self.model(token, past_key_values=self.cache).logits[:, -1]

    def truth(self, token: Tensor) -> Tensor:
        """What the newest logits should be: of the same weights on the whole text, without a cache, in float64."""
        more = token.expand(-1, self.cache.get_seq_length() - self.ids.shape[1])
        whole = torch.cat((self.ids, more), dim=1)
        logits: Tensor = wider(self.model)(whole, use_cache=False, logits_to_keep=1).logits
        return logits[:, -1]


@torch.no_grad()
def _prefill(length: int, repeats: int, device: str, seed: int) -> list[dict[str, Any]]:
    """`length` tokens through two layers into an empty cache."""
    texts = _texts(length, device, seed)
    return _against_rope("prefill", length, texts, {name: x.read for name, x in texts.items()}, repeats, device)


@torch.no_grad()
def _decode(length: int, repeats: int, device: str, seed: int) -> list[dict[str, Any]]:
    """One token through two layers with `length` tokens in the cache."""
    texts, calls = _texts(length, device, seed), {}
    for name, text in texts.items():
        text.read()
        calls[name] = partial(text.step, _token(device))
    rows = _against_rope("decode", length, texts, calls, repeats, device)
    for row in rows:
        cache = texts[row["attention"]].cache
        row["bytes_a_token"] = cache.nbytes // cache.get_seq_length()
    return rows


def _texts(length: int, device: str, seed: int) -> dict[str, Text]:
    models = _models(device, seed)
    ids = torch.randint(0, 256, (1, length), device=device)
    return {name: Text(model, ids) for name, model in models.items()}


def _token(device: str) -> Tensor:
    """The token that is given again and again."""
    return torch.zeros(1, 1, dtype=torch.long, device=device)


def _against_rope(
    kind: str,
    length: int,
    texts: Mapping[str, Text],
    calls: Mapping[str, Callable[[], None]],
    repeats: int,
    device: str,
) -> list[dict[str, Any]]:
    """One row a contestant; its calls and RoPE's are neighbours in time, so that drift does not enter the ratio.

    Each has the difference of the last timed call's logits from float64; one that is too large leaves no row at all.
    """
    in_turn(calls, repeats=2, device=device)  # warms up, and makes room in the caches
    seconds, rows = in_turn(calls, repeats=repeats, device=device), []
    for name, found in seconds.items():
        ratio = quantiles([ours / theirs for ours, theirs in zip(found, seconds["rope"], strict=True)])
        row = {"kind": kind, "attention": name, "length": length, "median": statistics.median(found)}
        row["over_rope"] = ratio.spread
        truth = texts[name].truth(_token(device))
        rows.append(row | as_timed(f"{kind} of {length}, {name}", texts[name].logits, truth))
    return rows


@torch.no_grad()
def _against_published(length: int, repeats: int, device: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    q, v = (torch.randn(1, HEADS, length, WIDTH, device=device) for _ in range(2))
    t = torch.rand(1, HEADS, length, WIDTH // 2, device=device)
    rotary = Rotary(WIDTH)
    calls = {
        "farspan": lambda: coca_attention(q, t, v, rotary=rotary, form="slack"),
        "published": lambda: published_coca(q, t, v, rotary),
    }
    coca_attention(q[:, :, :64], t[:, :, :64], v[:, :, :64], rotary=rotary)
    peaks = {name: measure(call, repeats=0, device=device).peak_bytes for name, call in calls.items()}
    seconds = in_turn(calls, repeats=repeats, device=device)
    difference = float((calls["farspan"]() - calls["published"]()).abs().max())
    if difference > 1e-3:
        raise ResultsDifferError(
            f"published and fused CoCA differ by {difference:.1e} at {length} tokens (allowed: 1e-3)"
        )
    ratios = [theirs / ours for ours, theirs in zip(seconds["farspan"], seconds["published"], strict=True)]
    return {
        "kind": "published",
        "form": "slack",
        "length": length,
        "heads": HEADS,
        "head_dim": WIDTH,
        "max_difference": difference,
        "seconds": seconds,
        "peak_bytes": peaks,
        "speedup": statistics.median(ratios),
        "memory_ratio": peaks["published"] / peaks["farspan"],
    }
