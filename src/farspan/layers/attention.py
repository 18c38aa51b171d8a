"""Attention layers: weights, and one op call each."""

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farspan.errors import require, require_choice
from farspan.layers.spec import AttentionSpec
from farspan.ops import Rotary, alibi_attention, coca_attention, rope_attention
from farspan.ops.coca import decoding
from farspan.ops.coca.preparation import coca_plan, prepared
from farspan.ops.coca.waves import Waves, takes_waves
from farspan.ops.phases import PhasePlan
from farspan.ops.positions import Positions, PositionsArgument, resolve
from farspan.ops.rotary import Angles, Plan, odd_width, working_dtype
from farspan.ops.scaling import log_length
from farspan.ops.softmax.interface import rotated

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "softplus": F.softplus}


class Cache(Protocol):
    """What a layer asks of its memory: :class:`LayerCache`, or a layer of any transformers Cache."""

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]: ...

    def get_seq_length(self) -> int: ...


class Attention(nn.Module):
    """Self-attention of any kind: projections, one op, output projection.

    CoCA, softmax or linear, has `t_proj`, of d/2 a key head, where the others have `k_proj`; strict CoCA's `q_proj`
    gives d/2 a head, used for both members of each pair (Eq. 11).

    Args:
        hidden_size: width of the input and output.
        num_heads: query heads h.
        spec: the kind of attention.
        rotary: the angles; ignored where the spec says no rotation.
        num_key_heads: key heads g, a divisor of h; default h.
        head_dim: d; default hidden_size / h.
        qkv_bias, out_bias: give the projections a bias.
        qk_norm_eps: normalise q and k (or t, before its activation) a head with RMSNorm (Qwen3); None = no.
        coca_activation: what keeps t ≥ 0, "relu" (the paper) or "softplus".
        causal: a query sees keys up to itself.
        decode_backend: what CoCA's decoding steps run on: "sdpa" turns the cached t anew each time; "triton" reads it
            as it is (:mod:`farspan.ops.coca.decoding`) and raises where device, dtype or width forbid it; prompts,
            gradients and documents still go to SDPA; "auto" chooses. Other kinds of attention do not ask.
        log_length: the length of training, past which scores grow with the logarithm of a query's place in its text
            (:func:`farspan.ops.scaling.log_length`); None = never.
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
        decode_backend: str = "auto",
        log_length: int | None = None,
    ) -> None:
        super().__init__()
        require_choice("coca_activation", coca_activation, ACTIVATIONS)
        require_choice("decode_backend", decode_backend, decoding.BACKENDS)
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
        _check_shape(self)
        if self.spec.rotary and rotary is None:
            rotary = Rotary(self.head_dim)
        self.rotary = rotary if self.spec.rotary else None
        self.causal, self.coca_activation, self._decode_backend = causal, coca_activation, decode_backend
        require(
            log_length is None or (type(log_length) is int and log_length > 1 and causal and not self.spec.linear),
            f"log_length must be None or a length ≥ 2, in a causal layer with a softmax, got {log_length!r} for "
            f"{self.spec.name!r}, causal={causal}; leave it out",
        )
        self._log_length = log_length
        self.scaling = self.head_dim**-0.5
        self.form = "slack" if self.spec.form == "slack" else "exact"  # strict is exact on a tied query
        coca = self.spec.collinear
        self.key_width = self.head_dim // 2 if coca else self.head_dim
        self.query_width = self.head_dim // 2 if self.spec.form == "strict" else self.head_dim
        self.q_proj = nn.Linear(hidden_size, num_heads * self.query_width, bias=qkv_bias)
        key_proj = nn.Linear(hidden_size, self.num_key_heads * self.key_width, bias=qkv_bias)
        self.register_module("t_proj" if coca else "k_proj", key_proj)
        self.v_proj = nn.Linear(hidden_size, self.num_key_heads * self.head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=out_bias)
        if qk_norm_eps is not None:
            self.q_norm = nn.RMSNorm(self.query_width, eps=qk_norm_eps)
            self.register_module("t_norm" if coca else "k_norm", nn.RMSNorm(self.key_width, eps=qk_norm_eps))
        self.qk_norm = qk_norm_eps is not None

    @property
    def decode_backend(self) -> str:
        """What decoding steps run on."""
        return self._decode_backend

    @property
    def log_length(self) -> int | None:
        """The length past which scores grow with the logarithm of a query's place in its text, if they do."""
        return self._log_length

    def takes_half_width(
        self, n: int, dtype: torch.dtype, device: torch.device, *, gradient: bool, documents: bool
    ) -> bool:
        """Whether a call with n tokens is a decoding step on the half-width kernel."""
        if self.spec.kind != "coca":
            return False
        group = self.num_heads // self.num_key_heads
        case = decoding.Case(n, group, self.head_dim, dtype, device, gradient, documents)
        return decoding.takes_half_width(case, self.decode_backend, "decode_backend")

    def takes_waves(self, n: int, device: torch.device, *, documents: bool) -> bool:
        """Whether a call with n tokens reads un-rotated t through :class:`Waves`; decode_backend="sdpa" never does."""
        if self.spec.kind != "coca" or self.decode_backend == "sdpa":
            return False
        return takes_waves(n, device, gradient=torch.is_grad_enabled(), documents=documents)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (b, n, hidden) → q (b, h, n, d), k (b, g, n, d) or t (b, g, n, d/2), v (b, g, n, d); nothing rotated."""
        letter = "t" if self.spec.collinear else "k"
        q = self.q_proj(x).unflatten(-1, (-1, self.query_width))
        k = self.get_submodule(f"{letter}_proj")(x).unflatten(-1, (-1, self.key_width))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.qk_norm:
            q, k = self.q_norm(q), self.get_submodule(f"{letter}_norm")(k)
        if letter == "t":
            k = ACTIVATIONS[self.coca_activation](k)  # Eq. 6: one non-negative coefficient a pair
        if self.query_width != self.head_dim:
            q = torch.cat((q, q), dim=-1)  # Eq. 11
        q, k = q.to(v.dtype), k.to(v.dtype)  # autocast runs norms and softplus wider than the projections
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def gain(self, places: Positions, dtype: torch.dtype) -> Tensor | None:
        """What `log_length` multiplies queries by, (b|1, 1, n, 1); None where that is 1 for all."""
        trained, window = self.log_length, self.spec.window
        if trained is None or (window is not None and window <= trained):
            return None
        if places.first is not None and places.first + places.m <= trained:
            return None
        count = places.query + 1
        gain = log_length(count if window is None else count.clamp(max=window), trained)
        gain = gain.sqrt() if self.spec.kind == "coca" else gain  # CoCA's scores are of second degree in the query
        return gain[:, None, :, None].to(working_dtype(dtype))

    def plan(self, places: Positions, dtype: torch.dtype) -> Plan | PhasePlan | None:
        """The angles of a call whose queries come in a dtype, as this layer wants them; None without rotation."""
        if self.rotary is None:
            return None
        if self.wants_phases:
            return coca_plan(self.rotary, places, causal=self.causal, dtype=dtype)
        return self.rotary.plan(places, places.n, places.m, causal=self.causal, dtype=dtype)

    @property
    def wants_phases(self) -> bool:
        """Whether a kernel may prepare its queries and keys: strict CoCA's tied query would first have to be written
        out for it, where torch.compile doubles it on the way."""
        return self.spec.kind == "coca" and self.spec.form != "strict"

    def features(self, q: Tensor, k: Tensor, plan: Plan | PhasePlan | None) -> tuple[Tensor, Tensor]:
        """Queries and keys whose plain dot product is this layer's score, under a plan of one segment."""
        query, key = (None, None) if plan is None else (plan[0].query, plan[0].key)
        if self.spec.kind == "coca":
            q, k = prepared(q, k, query, key, form=self.form)
            gap = self.head_dim - q.shape[-1]  # NoPE needs d/2, but other kernels want one width
            return (F.pad(q, (0, gap)), F.pad(k, (0, gap))) if gap else (q, k)
        if query is None:
            return q, k
        assert isinstance(query, Angles)
        assert isinstance(key, Angles)
        return rotated(q, k, query, key)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        plan: Plan | PhasePlan | Waves | None,
        positions: PositionsArgument = None,
        padding_mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """The layer's op → (b, h, n, d). Without a plan, q and k come from :meth:`features`."""
        options = self._options(positions, padding_mask, documents)
        if self.spec.kind == "alibi":
            return alibi_attention(q, k, v, **options)
        if isinstance(plan, Waves) or (self.spec.kind == "coca" and plan is not None):
            return coca_attention(q, k, v, rotary=plan, form=self.form, **options)
        return rope_attention(q, k, v, rotary=cast("Plan | None", plan), **options)  # phases are for CoCA alone

    def decode(self, q: Tensor, t: Tensor, v: Tensor, *, slots: decoding.Slots, steps: decoding.Steps | None) -> Tensor:
        """A decoding step on the half-width kernel → (b, h, n, d); q and t un-rotated, as they come from a cache."""
        options: dict[str, Any] = {"causal": self.causal, "window": self.spec.window, "scale": self.scaling}
        return decoding.attend_half_width(q, t, v, steps, slots, form=self.form, **options)

    def _options(
        self, positions: PositionsArgument, padding_mask: Tensor | None, documents: Tensor | None
    ) -> dict[str, Any]:
        return {
            "positions": positions,
            "causal": self.causal,
            "window": self.spec.window,
            "padding_mask": padding_mask,
            "documents": documents,
            "scale": self.scaling,
        }

    def forward(
        self,
        x: Tensor,
        *,
        cache: Cache | None = None,
        positions: PositionsArgument = None,
        padding_mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """x (b, n, hidden) → (b, n, hidden). With a cache, `positions` and masks cover the keys it returns."""
        q, k, v = self.project(x)
        if cache is not None:
            seen = cache.get_seq_length() + x.shape[1]
            k, v = cache.update(k, v)
            positions = seen - k.shape[2] if positions is None else positions
        if self.log_length is not None:
            require(
                positions is not None or (documents is None and padding_mask is None),
                "positions must be given with log_length where there are documents or padding, got None: the place of "
                "a token in its text decides; count from each document's start",
            )
            q = sharpened(q, self.gain(resolve(positions, q.shape[2], k.shape[2], q.device, documents), q.dtype))
        gradient = decoding.wants_gradient(q, k, v)
        if self.takes_half_width(q.shape[2], q.dtype, x.device, gradient=gradient, documents=documents is not None):
            options = self._options(positions, padding_mask, documents)
            out = coca_attention(q, k, v, rotary=self.rotary, form=self.form, backend="triton", **options)
        else:
            out = self._turn_and_attend(q, k, v, positions, padding_mask, documents)
        del q, k, v  # half of the peak at 32k tokens, were they still there during the output projection
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _turn_and_attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: PositionsArgument,
        padding_mask: Tensor | None,
        documents: Tensor | None,
    ) -> Tensor:
        """Attention by way of waves for one query, or of ready queries and keys."""
        plan: Plan | PhasePlan | Waves | None
        places = resolve(positions, q.shape[2], k.shape[2], q.device, documents)
        if self.takes_waves(places.n, q.device, documents=documents is not None):
            plan = Waves.of(self.rotary, places, form=self.form, causal=self.causal, dtype=q.dtype)
        else:
            plan = self.plan(places, q.dtype)
        if plan is None or (isinstance(plan, tuple) and len(plan) == 1):
            (q, k), plan = self.features(q, k, plan), None
        return self.attend(q, k, v, plan=plan, positions=positions, padding_mask=padding_mask, documents=documents)


def sharpened(q: Tensor, gain: Tensor | None) -> Tensor:
    """Queries times :meth:`Attention.gain`, rounded once."""
    return q if gain is None else (q * gain).to(q.dtype)


def _check_shape(layer: Attention) -> None:
    require(layer.head_dim % 2 == 0, lambda: odd_width(layer.head_dim))
    require(
        layer.num_heads % layer.num_key_heads == 0,
        f"num_key_heads must divide num_heads = {layer.num_heads}, got {layer.num_key_heads}; choose a divisor",
    )
