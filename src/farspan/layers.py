"""Attention layers as plain nn.Modules, usable in anyone's transformer."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farspan.cache import LayerCache, StateCache
from farspan.errors import require, require_choice, unknown
from farspan.ops.coca import (
    coca_attention,
    coca_features,
    kernel_features,
    polar_features,
    pope_attention,
    why_not_feature_kernel,
)
from farspan.ops.coca_decode import MOST_ROWS
from farspan.ops.cosformer import cosformer_attention
from farspan.ops.device import working_dtype
from farspan.ops.masking import LIMIT, AttentionContext, AttentionMask
from farspan.ops.rotary import Rotary, log_length, odd_width, step_length
from farspan.ops.softmax import alibi_attention, rope_attention

__all__ = [
    "AlibiAttention",
    "Attention",
    "AttentionSpec",
    "CocaAttention",
    "CosformerAttention",
    "LayerCache",
    "LinearCocaAttention",
    "RopeAttention",
    "StateCache",
]

NAMES = ("rope", "alibi", "coca-exact", "coca-strict", "coca-slack", "coca-polar", "pope", "cosformer", "linear-coca")
"""Every attention that has a name."""
KINDS = ("rope", "alibi", "coca", "pope", "cosformer", "linear-coca")
COCA_FORMS = ("exact", "strict", "slack", "polar")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "softplus": F.softplus}
LENGTH_FORMS = ("log", "learned", "step")
"""How scores follow the number n of keys past the training length L0: ln n / ln L0, s·ln n with s learned per head, or
1 + 0.1·ln(1 + ⌊position / L0⌋)."""


@dataclass(frozen=True)
class AttentionSpec:
    """The attention of one layer.

    >>> AttentionSpec.parse("coca-exact")
    AttentionSpec(kind='coca', form='exact', window=None, rotary=True)
    >>> AttentionSpec.parse({"kind": "coca", "form": "exact", "window": 128}).name
    'coca-exact'
    """

    kind: str
    """"rope", "alibi", "coca", "pope", "cosformer" or "linear-coca"."""
    form: str | None = None
    """For CoCA: "exact" (default), "strict", "slack" or "polar"."""
    window: int | None = None
    """See only the last `window` keys; None = all."""
    rotary: bool = True
    """False = no positions in this layer (NoPE; in a linear layer: no re-weighting). ALiBi never rotates."""

    def __post_init__(self) -> None:
        require_choice("kind", self.kind, KINDS)
        if self.kind == "coca":
            object.__setattr__(self, "form", self.form or "exact")
            require_choice("form", self.form, COCA_FORMS)
        else:
            require(self.form is None, f"form belongs to kind 'coca', got {self.form!r} for {self.kind!r}; remove it")
        if self.kind == "alibi":
            object.__setattr__(self, "rotary", False)
        require(
            self.window is None or not self.linear,
            f"window cannot be combined with kind {self.kind!r}, got {self.window!r}; its sums hold the whole sequence",
        )
        require(
            self.window is None or (isinstance(self.window, int) and 1 <= self.window <= LIMIT),
            f"window must be a whole number of keys ≥ 1 or None, got {self.window!r}; None sees everything",
        )

    @property
    def name(self) -> str:
        """The name among :data:`NAMES`."""
        return f"coca-{self.form}" if self.kind == "coca" else self.kind

    @property
    def linear(self) -> bool:
        """Whether the layer keeps sums in place of keys."""
        return self.kind in ("cosformer", "linear-coca")

    @property
    def collinear(self) -> bool:
        """Whether its keys are coefficients t ≥ 0, d/2 per head."""
        return self.kind in ("coca", "linear-coca")

    @property
    def polar(self) -> bool:
        """Whether queries and keys are magnitudes: PoPE, and CoCA's polar form."""
        return self.kind == "pope" or self.form == "polar"

    @property
    def shiftable(self) -> bool:
        """Whether keys of neighbours can be mixed: all are kept, and none is rotated."""
        return self.kind == "rope" and not self.rotary and self.window is None

    @classmethod
    def parse(cls, value: "str | Mapping[str, Any] | AttentionSpec") -> "AttentionSpec":
        """Make a spec from its name, from a mapping of its fields, or from itself."""
        if isinstance(value, AttentionSpec):
            return value
        if isinstance(value, str):
            if value not in NAMES:
                raise unknown("attention", value, NAMES if value in HYBRIDS else [*NAMES, *HYBRIDS])
            if value in KINDS:
                return cls(value)
            kind, _, form = value.partition("-")
            return cls(kind, form)
        require(
            isinstance(value, Mapping),
            f"attention must be a name or a mapping for each layer, got {value!r}; choose from {', '.join(NAMES)}",
        )
        options = [field.name for field in fields(cls)]
        for key in value:
            if key not in options:
                raise unknown("attention key", key, options)
        require("kind" in value, f"attention needs a 'kind' in each layer's mapping, got {dict(value)!r}")
        return cls(**value)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for a configuration file."""
        return asdict(self)


HYBRIDS = {
    "hybrid": "pope",
    "hybrid-rope": "rope",
    "hybrid-coca-exact": "coca-exact",
    "hybrid-coca-polar": "coca-polar",
    "hybrid-pope": "pope",
    "hybrid-cosformer": "cosformer",
}
"""Layouts by name, and the attention of their local layers."""


def hybrid(name: str, layers: int, *, window: int | None = None, global_every: int = 4) -> list[AttentionSpec]:
    """Return local layers, and one global layer without positions as the last of each `global_every`.

    Local layers see the last `window` keys (128 by default); those of "hybrid-cosformer" sum up all keys instead.

    >>> [(spec.name, spec.window, spec.rotary) for spec in hybrid("hybrid-rope", 4, window=64)]
    [('rope', 64, True), ('rope', 64, True), ('rope', 64, True), ('rope', None, False)]
    """
    require_choice("attention", name, HYBRIDS)
    require(
        isinstance(global_every, int) and 1 < global_every <= layers,
        f"global_every must be 2 … {layers}, the number of layers, got {global_every!r}: each hybrid has local layers "
        "and at least one global layer",
    )
    local = AttentionSpec.parse(HYBRIDS[name])
    if not local.linear:
        local = replace(local, window=128 if window is None else window)
    else:
        require(
            window is None, f"window must be left out of {name!r}, got {window!r}; its local layers sum up all keys"
        )
    everywhere = AttentionSpec("rope", rotary=False)
    return [everywhere if (layer + 1) % global_every == 0 else local for layer in range(layers)]


class Attention(nn.Module):
    """Self-attention of any softmax kind: projections, one op, output projection.

    CoCA has `t_proj`, of d/2 outputs per key head, in place of `k_proj`. The `q_proj` of its strict and polar forms has
    d/2 outputs per head; strict uses each for both members of a pair (Eq. 11). PoPE and the polar form learn a `phase`
    per head and frequency, and keep queries and keys ≥ 0 by a softplus.

    Args:
        hidden_size: width of input and output.
        num_heads: query heads h.
        spec: the kind of attention.
        rotary: the angles; ignored where the spec says no rotation.
        num_key_heads: key heads g, a divisor of h; default h.
        head_dim: d; default hidden_size / h.
        qkv_bias, out_bias: give the projections a bias.
        qk_norm_eps: normalise q and k (or t, before its activation) per head with RMSNorm (Qwen3); None = no.
        causal: a query sees keys up to itself.
        log_length: length of training, past which scores grow with the logarithm of a query's position
            (:func:`farspan.ops.rotary.log_length`); None = never.
        length_form: how they grow, one of :data:`LENGTH_FORMS`. "learned" gives the layer a `length_scale` per head.
        coca_activation, polar_phase, polar_activation, kv_shift: as in :class:`farspan.FarspanConfig`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        spec: AttentionSpec | str,
        *,
        rotary: Rotary | None = None,
        num_key_heads: int | None = None,
        head_dim: int | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
        coca_activation: str = "relu",
        causal: bool = True,
        log_length: int | None = None,
        length_form: str = "log",
        polar_phase: bool = True,
        polar_activation: str = "softplus",
        kv_shift: bool = False,
    ) -> None:
        super().__init__()
        require_choice("coca_activation", coca_activation, ACTIVATIONS)
        require_choice("polar_activation", polar_activation, ACTIVATIONS)
        require_choice("length_form", length_form, LENGTH_FORMS)
        self.spec = AttentionSpec.parse(spec)
        require(
            type(self) is not Attention or not self.spec.linear,
            f"spec {self.spec.name!r} is a linear attention, which Attention is not; "
            "build CosformerAttention, which also needs its max_length, or LinearCocaAttention",
        )
        self.num_heads, self.num_key_heads = num_heads, num_key_heads or num_heads
        require(
            head_dim is not None or hidden_size % num_heads == 0,
            f"hidden_size must be a multiple of num_heads = {num_heads}, got {hidden_size}; or give head_dim",
        )
        self.head_dim = head_dim or hidden_size // num_heads
        require(self.head_dim % 2 == 0, lambda: odd_width(self.head_dim))
        require(
            num_heads % self.num_key_heads == 0,
            f"num_key_heads must divide num_heads = {num_heads}, got {self.num_key_heads}; choose a divisor",
        )
        require(
            log_length is None or (type(log_length) is int and log_length > 1 and causal and not self.spec.linear),
            f"log_length must be None or a length ≥ 2, in a causal layer with a softmax, got {log_length!r} for "
            f"{self.spec.name!r}, causal={causal}; leave it out",
        )
        self.rotary = (rotary or Rotary(self.head_dim)) if self.spec.rotary else None
        if self.spec.kind == "pope" and self.rotary is not None:
            self.rotary = replace(self.rotary, dim=2 * self.head_dim)  # d frequencies
        self.causal, self.coca_activation = causal, coca_activation
        self.log_length, self.length_form, self.polar_activation = log_length, length_form, polar_activation
        self.scaling = self.head_dim**-0.5
        self.form = "slack" if self.spec.form == "slack" else "exact"  # strict is exact with a tied query
        self.polar, self.collinear = self.spec.polar, self.spec.collinear
        self.squares = self.spec.kind == "coca" and not self.polar  # scores are of second degree in the query
        self.key_width = self.head_dim // 2 if self.collinear else self.head_dim
        self.query_width = self.head_dim // 2 if self.spec.form in ("strict", "polar") else self.head_dim
        self.q_proj = nn.Linear(hidden_size, num_heads * self.query_width, bias=qkv_bias)
        key_proj = nn.Linear(hidden_size, self.num_key_heads * self.key_width, bias=qkv_bias)
        self.register_module("t_proj" if self.collinear else "k_proj", key_proj)
        self.v_proj = nn.Linear(hidden_size, self.num_key_heads * self.head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=out_bias)
        self.phase: nn.Parameter | None = None
        self.length_scale: nn.Parameter | None = None
        self.shift: nn.Parameter | None = None
        if self.polar and self.spec.rotary and polar_phase:
            self.phase = nn.Parameter(torch.zeros(num_heads * self.key_width))
        if log_length is not None and length_form == "learned":
            self.length_scale = nn.Parameter(torch.full((num_heads,), self.first_length_scale))
        if kv_shift:
            require(self.spec.shiftable, f"kv_shift needs a layer without window and positions, got {self.spec}")
            self.shift = nn.Parameter(torch.zeros(2 * self.num_key_heads))
        self.qk_norm = qk_norm_eps is not None
        if qk_norm_eps is not None:
            self.q_norm = nn.RMSNorm(self.query_width, eps=qk_norm_eps)
            self.register_module("t_norm" if self.collinear else "k_norm", nn.RMSNorm(self.key_width, eps=qk_norm_eps))

    @property
    def first_length_scale(self) -> float:
        """The value of `length_scale` before training: no change at the length of training."""
        return math.log(self.log_length or math.e) ** (-0.5 if self.squares else -1.0)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x (b, n, hidden) to q (b, h, n, d), k (b, g, n, d) or t (b, g, n, d/2), and v (b, g, n, d)."""
        shape = (*x.shape[:-1], -1)
        q = self.q_proj(x).view(*shape, self.query_width)
        k = getattr(self, "t_proj" if self.collinear else "k_proj")(x).view(*shape, self.key_width)
        v = self.v_proj(x).view(*shape, self.head_dim)
        if self.qk_norm:
            q, k = self.q_norm(q), getattr(self, "t_norm" if self.collinear else "k_norm")(k)
        if self.polar:
            q, k = ACTIVATIONS[self.polar_activation](q), ACTIVATIONS[self.polar_activation](k)  # magnitudes
        elif self.collinear:
            k = ACTIVATIONS[self.coca_activation](k)  # Eq. 6: one non-negative coefficient per pair
        if self.spec.form == "strict":
            q = torch.cat((q, q), dim=-1)  # Eq. 11
        if q.dtype != v.dtype or k.dtype != v.dtype:  # autocast runs norms and softplus wider than the projections
            q, k = q.to(v.dtype), k.to(v.dtype)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def forward(
        self, x: Tensor, context: AttentionContext | None = None, cache: Any = None, **given: Tensor | None
    ) -> Tensor:
        """Attend from x (b, n, hidden) to itself and to what the cache holds → (b, n, hidden).

        The cache is a :class:`LayerCache`, or a layer of any transformers Cache. A model passes its `context`; without
        one, `attention_mask` and `position_ids` may be given, see :class:`~farspan.ops.AttentionContext`.
        """
        if context is None:
            x, context = self.begin(x, cache, **given)
        q, k, v, mask, rotary = self.update_cache(*self.project(x), context, cache)
        out = self.attend(q, k, v, mask, rotary)
        del q, k, v  # at 32k tokens they would be half of the peak during the output projection
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def begin(self, x: Tensor, cache: Any, **given: Any) -> tuple[Tensor, AttentionContext]:
        """Make the context of new tokens x (b, n, hidden), and return x without what padding holds."""
        past, windows = 0 if cache is None else cache.get_seq_length(), self.spec.window is not None
        context = AttentionContext(
            x, causal=self.causal, past=past, cached=cache is not None, has_windows=windows, **given
        )
        return (x if context.padding is None else context.clean(x, past)), context

    def update_cache(
        self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, cache: Any
    ) -> tuple[Tensor, Tensor, Tensor, AttentionMask, Rotary | None]:
        """Add new keys and values to the cache; return what :meth:`attend` takes.

        With fixed frequencies RoPE caches rotated keys, as LLaMA does. Windows of other kinds cache what dot products
        take: wider, but there are few, and each is made once. All else is cached un-rotated.
        """
        rotary = self.rotary
        if cache is None:
            return q, k, v, context.mask(self.spec.window), rotary
        past, (length, offset) = cache.get_seq_length(), cache.get_mask_sizes(q.shape[2])
        mask = context.mask(self.spec.window, past=past, length=length, offset=offset)
        if rotary is not None and not rotary.is_dynamic:
            if self.spec.kind == "rope":
                q, k = context.new_tokens(past).angles(rotary).rotate_new(q, k)
                rotary = None
            elif self.caches_features(q.dtype):
                q, k = self._features(self.sharpen(q, mask), k, context.new_tokens(past), rotary)
                rotary = None
        k, v = cache.update(k, v)
        if k.shape[2] > mask.m:  # static: the tail is still empty; growing: more than the window was kept
            keys = slice(None, mask.m) if cache.is_compileable else slice(-mask.m, None)
            k, v = k[:, :, keys], v[:, :, keys]
        return q, k, v, mask, rotary

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, rotary: Rotary | None) -> Tensor:
        """Call the layer's op: (b, h, n, d), (b, g, m, ·), (b, g, m, d) → (b, h, n, d)."""
        if k.shape[-1] != self.key_width:  # features of a window's cache
            return rope_attention(q, k, v, rotary=None, mask=mask, scale=self.scaling)
        q = self.sharpen(q, mask)
        if self.shift is not None:
            shares = self.shift.view(2, -1, 1, 1).to(k.dtype)
            k, v = mask.mix_neighbours(k, shares[0]), mask.mix_neighbours(v, shares[1])
        if self.polar:
            return pope_attention(q, k, v, rotary=rotary, phase=self._phases(), mask=mask, scale=self.scaling)
        if self.squares:
            # For the feature kernel the tied query of strict CoCA would be written out.
            backend = "sdpa" if self.spec.form == "strict" and q.shape[2] > MOST_ROWS else "auto"
            return coca_attention(
                q, k, v, rotary=rotary, form=self.form, mask=mask, scale=self.scaling, backend=backend
            )
        if self.spec.kind == "alibi":
            return alibi_attention(q, k, v, mask=mask, scale=self.scaling)
        return rope_attention(q, k, v, rotary=rotary, mask=mask, scale=self.scaling)

    def _phases(self) -> Tensor | None:
        """Return the learned phases, (h, frequencies)."""
        return None if self.phase is None else self.phase.view(self.num_heads, -1)

    def features(self, q: Tensor, k: Tensor, mask: AttentionMask, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
        """Compute queries and keys whose plain dot product is this layer's score, for other attention code."""
        if k.shape[-1] != self.key_width:  # of a window's cache
            return q, k
        return self._features(self.sharpen(q, mask), k, mask, rotary)

    def _features(self, q: Tensor, k: Tensor, mask: AttentionMask, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
        if rotary is not None and self._prepares_by_kernel(q.dtype, q.device):
            return kernel_features(q, k, mask.angles(rotary), "polar" if self.polar else self.form, self._phases())
        if self.polar:
            query, key = mask.tables(rotary, q.dtype)
            return polar_features(q, query, self._phases()), polar_features(k, key)
        if self.squares:
            q, k = coca_features(q, k, *mask.tables(rotary, q.dtype), form=self.form)
            gap = self.head_dim - q.shape[-1]  # NoPE needs d/2, but other kernels want one width
            return (F.pad(q, (0, gap)), F.pad(k, (0, gap))) if gap else (q, k)
        if rotary is None:
            return q, k
        angles = mask.angles(rotary)
        return angles.rotate_queries(q), angles.rotate_keys(k)

    def caches_features(self, dtype: torch.dtype) -> bool:
        """Whether the cache of this layer holds features of keys, which are wider than keys.

        In float16 CoCA's features depend on the queries beside them, see :func:`farspan.ops.coca.balance`.
        """
        windowed = self.spec.window is not None and self.rotary is not None and not self.rotary.is_dynamic
        return windowed and (self.polar or (self.squares and dtype != torch.float16))

    def _prepares_by_kernel(self, dtype: torch.dtype, device: torch.device) -> bool:
        if self.rotary is None or self.spec.form == "strict" or not (self.polar or self.squares):
            return False
        return why_not_feature_kernel(dtype, self.rotary.dim, device) is None

    def prepare(self, context: AttentionContext, dtype: torch.dtype) -> None:
        """Compute what this layer shares with others in a forward pass without a cache, for queries of a dtype.

        For blocks that are compiled one by one: the first would otherwise fill the context, and need its own graph.
        """
        mask = context.mask(self.spec.window)
        if self.log_length is not None:
            self._shared_gain(mask, dtype)
        if self.rotary is not None:
            angles = mask.angles(self.rotary)
            if self._prepares_by_kernel(dtype, context.device):
                _ = angles.steps
            else:
                angles.key(dtype)

    def sharpen(self, q: Tensor, mask: AttentionMask) -> Tensor:
        """Multiply queries by the length temperature of `log_length`, if the layer has one."""
        if self.log_length is None:
            return q
        gain = self._shared_gain(mask, q.dtype)
        if gain is not None and self.length_scale is not None:
            gain = gain * self.length_scale[:, None, None]
        return q if gain is None else (q * gain).to(q.dtype)

    def _shared_gain(self, mask: AttentionMask, dtype: torch.dtype) -> Tensor | None:
        key = ("log_length", self.log_length, self.length_form, self.squares, dtype)
        return mask.share(key, lambda: self._gain(mask, dtype))

    def _gain(self, mask: AttentionMask, dtype: torch.dtype) -> Tensor | None:
        """Compute what `log_length` multiplies queries by, (b|1, 1, n, 1); None if it is 1 for all."""
        trained, window = self.log_length, mask.window
        assert trained is not None
        if self.length_scale is None:
            in_window = window is not None and window <= trained
            if in_window or (mask.first is not None and mask.first + mask.m <= trained):
                return None
        count = mask.query_positions + 1
        count = count if window is None else count.clamp(max=window)
        if self.length_scale is not None:
            gain = count.double().clamp(min=1.0).log()
        else:
            gain = (step_length if self.length_form == "step" else log_length)(count, trained)
        return (gain.sqrt() if self.squares else gain)[:, None, :, None].to(working_dtype(dtype))


class CocaAttention(Attention):
    """Collinear constrained attention in form "exact", "strict" or "slack"; nope=True leaves rotation out.

    >>> layer, cache = CocaAttention(32, 4, num_key_heads=2), LayerCache()
    >>> x = torch.randn(1, 10, 32)
    >>> whole = layer(x)
    >>> pieces = torch.cat([layer(piece, cache=cache) for piece in x.split(4, dim=1)], dim=1)
    >>> torch.allclose(whole, pieces, atol=1e-6), cache.keys.shape
    (True, torch.Size([1, 2, 10, 4]))
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        form: str = "exact",
        window: int | None = None,
        nope: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, num_heads, AttentionSpec("coca", form, window, not nope), **options)


class RopeAttention(Attention):
    """Rotary attention (RoFormer, LLaMA); nope=True leaves rotation out.

    >>> layer, x = RopeAttention(32, 4, num_key_heads=2, window=3), torch.randn(1, 10, 32)
    >>> out, changed = layer(x), layer(torch.cat((x[:, :1] + 1, x[:, 1:]), dim=1))
    >>> (out != changed).any(-1).nonzero()[:, 1].tolist()  # the tokens that see the first one
    [0, 1, 2]
    """

    def __init__(
        self, hidden_size: int, num_heads: int, *, window: int | None = None, nope: bool = False, **options: Any
    ) -> None:
        super().__init__(hidden_size, num_heads, AttentionSpec("rope", None, window, not nope), **options)


class AlibiAttention(Attention):
    """Attention with linear biases, one fixed slope per head; only distances count.

    >>> layer, x = AlibiAttention(32, 4), torch.randn(1, 10, 32)
    >>> layer(x).shape, torch.allclose(layer(x), layer(x, position_ids=torch.arange(1000, 1010)[None]), atol=1e-5)
    (torch.Size([1, 10, 32]), True)
    """

    def __init__(self, hidden_size: int, num_heads: int, *, window: int | None = None, **options: Any) -> None:
        super().__init__(hidden_size, num_heads, AttentionSpec("alibi", None, window), **options)


class LinearAttention(Attention):
    """What linear layers share; a subclass says which op they call."""

    def op(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """Call the op with the layer's constants → (b, h, n, d), or with the state if `return_state`."""
        raise NotImplementedError

    def prepare(self, context: AttentionContext, dtype: torch.dtype) -> None:
        """Make the mask of the new tokens."""
        context.new_tokens()

    def forward(
        self, x: Tensor, context: AttentionContext | None = None, cache: Any = None, **given: Tensor | None
    ) -> Tensor:
        """Attend from x (b, n, hidden) to itself and to all that a :class:`StateCache` has summed → (b, n, hidden)."""
        if context is None:
            x, context = self.begin(x, cache, **given)
        mask = context.new_tokens(0 if cache is None else cache.get_seq_length())
        q, k, v = self.project(x)
        if cache is None:
            out = self.op(q, k, v, mask=mask)
        else:
            out, state = self.op(q, k, v, mask=mask, state=cache.state, return_state=True)
            cache.advance(state, x.shape[1])
        return self.o_proj(out.transpose(1, 2).flatten(2))


class CosformerAttention(LinearAttention):
    """Linear attention with cosine re-weighting.

    Args:
        max_length: M, a constant of the model: the distance at which the cosine reaches zero.
        beyond: what happens past M, see :func:`farspan.ops.cosformer_attention`.
        activation: "relu" (the paper) or "elu" (elu + 1).
        nope: leave the re-weighting out (linear attention, the paper's ablation).
        options: those of :class:`Attention`, except `rotary`.

    >>> layer, cache = CosformerAttention(32, 4, max_length=64, num_key_heads=2), StateCache()
    >>> x = torch.randn(1, 10, 32)
    >>> whole = layer(x)
    >>> pieces = torch.cat([layer(piece, cache=cache) for piece in x.split(4, dim=1)], dim=1)
    >>> torch.allclose(whole, pieces, atol=1e-6), cache.get_seq_length(), cache.nbytes
    (True, 10, 1176)
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        max_length: int,
        beyond: str = "raise",
        activation: str = "relu",
        nope: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, num_heads, AttentionSpec("cosformer", None, None, not nope), **options)
        self.rotary = None  # its one frequency is π/2M
        self.max_length, self.beyond, self.activation = max_length, beyond, activation

    def op(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        options |= {"beyond": self.beyond, "activation": self.activation, "reweight": self.spec.rotary}
        return cosformer_attention(q, k, v, max_length=self.max_length, **options)


class LinearCocaAttention(LinearAttention):
    """CoCA's factors ‖q_j‖² and t_j as the weights of a linear attention (experimental, in neither paper).

    The projections are exact CoCA's: `t_proj` has d/2 outputs per key head, kept ≥ 0 by `coca_activation`.

    Args:
        nope: leave the angles out.
        options: those of :class:`Attention`; `rotary` must have fixed frequencies (no dynamic NTK).

    >>> layer, cache = LinearCocaAttention(32, 4, num_key_heads=2), StateCache()
    >>> x = torch.randn(1, 10, 32)
    >>> whole = layer(x)
    >>> pieces = torch.cat([layer(piece, cache=cache) for piece in x.split(4, dim=1)], dim=1)
    >>> torch.allclose(whole, pieces, atol=1e-6), cache.get_seq_length(), cache.nbytes
    (True, 10, 568)
    """

    def __init__(self, hidden_size: int, num_heads: int, *, nope: bool = False, **options: Any) -> None:
        super().__init__(hidden_size, num_heads, AttentionSpec("linear-coca", None, None, not nope), **options)
        require(
            self.rotary is None or not self.rotary.is_dynamic,
            "rotary must have fixed frequencies in a linear layer, got dynamic NTK: sums cannot be rotated again; "
            "use NTK or Linear",
        )

    def op(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        from farspan.ops.linear_coca import linear_coca_attention  # experimental: loaded only where it is used

        return linear_coca_attention(q, k, v, rotary=self.rotary, **options)
