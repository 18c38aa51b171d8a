"""One query against un-rotated t, on a CPU: no key of width d is ever made.

With a single query Eq. 17 needs no products of sines: all heads share cos((m-n)θ_j), so score(n) = (t_n ∘ wave_n)·‖q‖²
is half as wide as a rotary score. Slack has two such waves, which a key head's only query mixes to one (docs/math.md).
The product t∘wave is made for one block of keys at a time, which stays in the processor's cache until it has met the
query.
"""

import threading
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from farspan.errors import require
from farspan.ops.launch import power_of_2
from farspan.ops.positions import Positions
from farspan.ops.rotary import Rotary, table, working_dtype
from farspan.ops.softmax.core import Sight, Span

BLOCK_ELEMENTS = 2**18
"""Elements of t∘wave for each thread in one block, give or take a half: a MiB in float32, near a core's own cache."""


class _Kept(threading.local):
    def __init__(self) -> None:
        self.rooms: dict[torch.dtype, Tensor] = {}


_KEPT = _Kept()
"""Of each thread, as two may decode at once."""


@dataclass(frozen=True)
class Waves:
    """What t is multiplied by for one query a row; a model makes it once for all layers, in place of a plan."""

    key: tuple[Tensor, ...]
    """Each (b|1, 1, m, d/2): cos((m-n)θ) for exact; cos nθ and sin nθ for slack; none without rotation (NoPE)."""
    query: tuple[Tensor, Tensor] | None = None
    """For slack cos and tan of the query's own phase, each (b|1, 1, 1, d/2)."""

    @classmethod
    def of(
        cls, rotary: Rotary | None, places: Positions, *, form: str, causal: bool = True, dtype: torch.dtype
    ) -> "Waves":
        """The waves of a call with one query.

        >>> Waves.of(Rotary(2), Positions(1, 3, torch.device("cpu"), 0, None, True), form="exact", dtype=torch.float32)
        Waves(key=(tensor([[[[-0.4161],
                  [ 0.5403],
                  [ 1.0000]]]]),), query=None)
        """
        if rotary is None:
            return cls(())
        (run,) = rotary.runs(places)
        if form == "exact":
            return cls(_key_waves(rotary, run.length, places, causal, dtype, sines=False).unbind())
        key = _key_waves(rotary, run.length, places, causal, dtype, sines=True)
        if places.aligned:  # the query stands where the last key does
            cos, sin = key[:, :, :, -1:].unbind()
        else:
            query = table(places.query, rotary.frequencies(run.length, places.device), rotary.factor, dtype)
            cos, sin = query.cos, query.sin
        return cls(key.unbind(), (cos, sin / cos))  # no float's cosine is 0, or nearer to it than 1e-19

    def check(self, q: Tensor, t: Tensor, form: str) -> None:
        """Refuse a call that these waves were not made for."""
        require(q.shape[2] == 1, lambda: f"ready waves are for one query, got {q.shape[2]}; pass the Rotary")
        if not self.key:
            return
        wave = self.key[0]
        require(
            wave.shape[2:] == t.shape[2:],
            lambda: (
                f"ready waves must have the keys and width of t {tuple(t.shape[2:])}, got {tuple(wave.shape[2:])}; "
                "make them for this call"
            ),
        )
        require(
            wave.shape[0] in (1, q.shape[0]),
            lambda: f"ready waves must be of 1 or {q.shape[0]} texts, got {wave.shape[0]}; make them for this call",
        )
        made_for = "exact" if self.query is None else "slack"
        require(form == made_for, f"ready waves were made for form {made_for!r}, got {form!r}; make them for this call")


def takes_waves(n: int, device: torch.device, *, gradient: bool, documents: bool) -> bool:
    """Whether backend="auto" runs a CoCA call here: one query on a CPU, with nothing to differentiate or compile.

    >>> takes_waves(1, torch.device("cpu"), gradient=False, documents=False)
    True
    """
    plain = not (gradient or documents or torch.compiler.is_compiling())
    return n == 1 and device.type == "cpu" and plain


def attend_waves(q: Tensor, t: Tensor, v: Tensor, waves: Waves, *, sight: Sight, scale: float) -> Tensor:
    """q (b, h, 1, d), un-rotated t (b, g, m, d/2) and v (b, g, m, dv) → (b, h, 1, dv) in q's dtype."""
    low, high = sight.key_range(0, 1)
    key = waves.key
    if high - low < t.shape[2]:
        t, v, key = t[:, :, low:high], v[:, :, low:high], tuple(wave[:, :, low:high] for wave in key)
    with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext():
        scores = _scores(*_amplitudes(q, waves, scale, grouped=q.shape[1] > t.shape[1]), t, key)
    blind = None
    if not sight.everything:
        mask = sight.mask(Span(0, 1, low, high), q.device)
        blind = ~mask.any(dim=-1, keepdim=True)
        by_row = scores.unflatten(0, t.shape[:2])
        scores = by_row.masked_fill(~(mask | blind), -torch.inf).flatten(0, 1)
    out = _means(scores, v.flatten(0, 1)).view(*q.shape[:3], v.shape[-1])
    return out if blind is None else out.masked_fill(blind, 0.0)


def _amplitudes(q: Tensor, waves: Waves, scale: float, *, grouped: bool) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """What t∘wave meets, times the scale: one for each wave; or one, and the sine's share in the wave cos + share·sin.

    With (a, b) a pair of q and φ the query's phase, slack's score is t times
    (a²+b²)cos φ cos nθ + ((b²-a²)cos φ + 2ab sin φ)sin nθ. All are (b, h, 1, d/2). Queries of a group would each have
    a wave of their own, which costs more than to meet both.
    """
    a, b = q.to(working_dtype(q.dtype)).chunk(2, dim=-1)
    if waves.query is None:
        return (torch.addcmul(a * a, b, b) * scale,), None
    cos, tan = waves.query
    first, second = a * a, b * b
    square = first + second
    share = torch.addcmul(second - first, a * b, tan, value=2) / (square + torch.finfo(square.dtype).tiny)
    amplitude = square * (cos * scale)
    return ((amplitude, amplitude * share), None) if grouped else ((amplitude,), share)


def _scores(amplitudes: tuple[Tensor, ...], share: Tensor | None, t: Tensor, waves: tuple[Tensor, ...]) -> Tensor:
    """amplitude·(t∘wave), summed over the waves or of the one that they are mixed to: (b·g, h/g, m), working dtype."""
    b, g, m, width = t.shape
    amplitudes = tuple(each.reshape(b * g, -1, width) for each in amplitudes)
    if not waves:
        (amplitude,) = amplitudes
        return torch.bmm(amplitude, t.to(amplitude.dtype).flatten(0, 1).mT)
    blocks = max(1, round(b * g * m * width / (BLOCK_ELEMENTS * torch.get_num_threads())))
    rows = max(min(m, 64), -(-m // blocks))  # alike, as a short block takes as many operations as a long one
    product = _room(amplitudes[0], b * g * rows * width).view(b, g, rows, width)
    keys = product.flatten(0, 1).mT
    parts: list[Tensor] = []
    for block, *turns in zip(t.split(rows, dim=2), *(wave.split(rows, dim=2) for wave in waves), strict=True):
        if (short := block.shape[2]) < rows:  # the last one
            product, keys = product[:, :, :short], keys[:, :, :short]
        if share is not None:
            cos, sin = turns
            torch.addcmul(cos, sin, share, out=product).mul_(block)
            parts.append(torch.bmm(amplitudes[0], keys))
            continue
        for amplitude, turn in zip(amplitudes, turns, strict=True):  # one at a time: both need twice the room
            torch.mul(block, turn, out=product)
            if turn is turns[0]:
                parts.append(torch.bmm(amplitude, keys))
            else:
                parts[-1].baddbmm_(amplitude, keys)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _room(like: Tensor, size: int) -> Tensor:
    """`size` numbers, the same ones from call to call: new ones would have to be paged in at every layer."""
    fake = type(like) is not Tensor  # of a trace without numbers; what is kept must be real
    if fake or size > 1.5 * BLOCK_ELEMENTS * torch.get_num_threads():  # many texts: too much to hold on to
        return like.new_empty(size)
    if like.dtype not in _KEPT.rooms or _KEPT.rooms[like.dtype].numel() < size:
        with torch.inference_mode(False):  # the next call may be outside it
            _KEPT.rooms[like.dtype] = torch.empty(size, dtype=like.dtype, device=like.device)
    return _KEPT.rooms[like.dtype][:size]


def _means(scores: Tensor, v: Tensor) -> Tensor:
    """softmax(scores)·v: (b·g, h/g, dv) in v's dtype."""
    if scores.dtype == v.dtype:
        return torch.bmm(scores.softmax(dim=-1), v)
    weights = (scores - scores.amax(dim=-1, keepdim=True)).exp()  # divided later: small shares would lose their digits
    wide = v.float() if v.dtype == torch.float16 else v  # whose range the sums of many keys leave
    return (torch.bmm(weights.to(wide.dtype), wide) / weights.sum(dim=-1, keepdim=True)).to(v.dtype)


def _key_waves(
    rotary: Rotary, length: int | Tensor | None, places: Positions, causal: bool, dtype: torch.dtype, *, sines: bool
) -> Tensor:
    """Waves of each key's phase, see :func:`_phases`: (1|2, b|1, 1, m, d/2), those of last time where they serve."""
    m, phases = places.m, None
    if places.first is not None:  # a look at the numbers would cost as much as a small layer
        least = places.first if sines else 1 - m
        most = least + m - 1
    else:
        phases = _phases(places, causal, sines)
        least, most = int(phases.min()), int(phases.max())
    ahead, behind = (most + 1, least) if sines else (1 - least, -most)
    fake = type(torch.empty(0, device="cpu")) is not Tensor  # a trace without numbers; what is kept must be real
    if behind < 0 or ahead > 2 * m or isinstance(length, Tensor) or rotary.follows_length or fake:
        phases = _phases(places, causal, sines) if phases is None else phases
        return _made(rotary, length, phases, dtype, sines)[:, :, None]
    room = power_of_2(ahead)
    start = 0 if sines else 1 - room
    lasting = _lasting(rotary, length, start, room, working_dtype(dtype), sines)
    chosen = lasting[:, :, least - start : most + 1 - start] if phases is None else lasting[:, 0, phases - start]
    return chosen[:, :, None]


def _phases(places: Positions, causal: bool, sines: bool) -> Tensor:
    """(b|1, m): where each key stands, for sines; for cosines alone how far behind the query, a number ≤ 0."""
    if sines:
        return places.key
    distance = places.key - places.query
    return distance.clamp(max=0) if causal else distance  # what lies ahead (a static cache's empty slots) is hidden


@lru_cache(maxsize=4)
def _lasting(rotary: Rotary, length: int | None, start: int, count: int, dtype: torch.dtype, sines: bool) -> Tensor:
    """Waves (1|2, 1, count, d/2) kept from step to step: making them anew costs as much as reading a layer's cache."""
    with torch.inference_mode(False), torch.no_grad():
        return _made(rotary, length, torch.arange(start, start + count, device="cpu")[None], dtype, sines)


def _made(rotary: Rotary, length: int | Tensor | None, phases: Tensor, dtype: torch.dtype, sines: bool) -> Tensor:
    """factor²·cos of phases (b|1, m), or factor·(cos, sin): (1|2, b|1, m, d/2)."""
    frequencies = rotary.frequencies(length, phases.device)
    angles = phases[:, :, None].to(frequencies.dtype) * (frequencies if frequencies.ndim == 1 else frequencies[:, None])
    factor = rotary.factor
    waves = torch.stack((angles.cos(), angles.sin())) * factor if sines else angles.cos()[None] * factor**2
    return waves.to(working_dtype(dtype))
