"""What a rotary layer multiplies, under each scaling: a(m, n) = Re Σ_j h_j e^{i(m-n)θ_j}, h_j = A_j(m)·conj B_j(n).

=========== ======================= ======= ===================================================================
layer       A_j                     B_j
=========== ======================= ======= ===================================================================
RoPE        q_j                     k_j     complex pairs: Θ_j = arg h_j may be anything (Eq. 3)
exact CoCA  ‖q_j‖²                  t_j     real and ≥ 0: Θ_j = 0 (Eq. 17)
slack CoCA  (a+b)(1-i) q_j / 2      t_j     q_j = a + ib; and beside it the echo (a-b)(1+i) q_j / 2, which rotates
                                            with m+n instead of m-n (docs/math.md, "Why slack is not relative")
=========== ======================= ======= ===================================================================
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from farspan.errors import require
from farspan.layers import Attention
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.ops.device import working_dtype
from farspan.ops.masking import make_mask
from farspan.ops.reference import governing_length, pairs
from farspan.ops.rotary import NTK, DynamicNTK, Linear, Rotary, Scaling, YaRN

SCALINGS = ("none", "linear", "ntk", "dynamic_ntk", "yarn")
""" "none" is the model as it was loaded."""


@dataclass(frozen=True)
class Factors:
    """One layer on one sequence of m tokens: A (h, m, d/2), B (g, m, d/2), both complex and before rotation."""

    layer: int
    query: Tensor
    key: Tensor
    initial: Tensor
    """A of Eq. 3, where CoCA's key is q∘t: Θ_j = arg(initial·conj B). It differs from `query` in slack only."""
    echo: Tensor | None
    """The part of slack CoCA that depends on absolute positions, shaped like `query`; None elsewhere."""
    rotary: Rotary
    scale: float
    """What the softmax multiplies scores by: 1/√d, and YaRN's temperature squared."""
    window: int | None

    @property
    def length(self) -> int:
        return self.query.shape[1]

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.query.shape[0] // self.key.shape[0]

    def first_key(self, query: int) -> int:
        """Return the first key that a query sees."""
        return 0 if self.window is None else max(0, query - self.window + 1)

    def logits(self, queries: Tensor) -> Tensor:
        """Compute what the softmax sees of queries at rising positions (n): (h, n, m), -inf at masked keys."""
        theta = frequencies(self.rotary, self.length, queries)
        positions = torch.arange(self.length, device=queries.device)
        out = self.query.real.new_empty(self.query.shape[0], queries.shape[0], self.length)
        starts = [0, *((theta[1:] != theta[:-1]).any(-1).nonzero().flatten() + 1).tolist(), queries.shape[0]]
        for start, stop in pairwise(starts):  # dynamic NTK: one run of queries per base
            query = self._rotated(queries[start:stop], theta[start])
            key = _real(self.key * rotation(positions, theta[start], self.key.dtype)).mT
            grouped = query.unflatten(0, (-1, self.groups)).flatten(1, 2) @ key  # no copy of a key per query head
            out[:, start:stop] = grouped.unflatten(1, (self.groups, -1)).flatten(0, 1)
        distance = queries[:, None] - positions
        masked = distance < 0 if self.window is None else (distance < 0) | (distance >= self.window)
        return (out * self.scale).masked_fill_(masked, -torch.inf)

    def _rotated(self, queries: Tensor, theta: Tensor) -> Tensor:
        rotations = rotation(queries, theta, self.query.dtype)
        rotated = self.query[:, queries] * rotations
        if self.echo is not None:  # Re(X·K) = Re(conj X · conj K): the echo meets the same keys mirrored
            rotated = rotated + (self.echo[:, queries] * rotations).conj()
        return _real(rotated)


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x).flatten(-2)


def rotation(positions: Tensor, theta: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute e^{inθ_j} for positions (n): (n, d/2), the angle in float64 whatever the dtype."""
    angle = positions[:, None].to(theta.dtype) * theta
    return torch.polar(torch.ones_like(angle), angle).to(dtype)


def frequencies(rotary: Rotary, length: int, queries: Tensor) -> Tensor:
    """Compute the frequencies of some queries of a sequence, (queries, d/2) float64: dynamic NTK's may differ."""
    lengths = governing_length(rotary, make_mask(length, length, 1, queries.device))
    theta = rotary.frequencies(lengths, queries.device)
    return theta.expand(queries.shape[0], -1) if theta.ndim == 1 else theta[0, queries]


def factors(attention: Attention, index: int, q: Tensor, k: Tensor) -> Factors:
    """Make factors from what a layer projects from one sequence: q (1, h, m, d), k (1, g, m, d) or t (…, d/2).

    >>> from farspan.layers import CocaAttention
    >>> layer = CocaAttention(32, 4)
    >>> q, t, _ = layer.project(torch.randn(1, 5, 32))
    >>> made = factors(layer, 0, q, t)
    >>> made.query.shape, bool((made.query * made.key.conj()).imag.any())
    (torch.Size([4, 5, 4]), False)
    """
    assert attention.rotary is not None
    scaling = attention.rotary.scaling
    scale = attention.scaling * (1.0 if scaling is None else scaling.attention_factor**2)
    z, echo = pairs(q[0]), None
    if attention.spec.kind == "coca":
        t = k[0].to(working_dtype(k.dtype))
        key = torch.complex(t, torch.zeros_like(t))
        a, b = z.real, z.imag
        square = a * a + b * b
        initial = query = torch.complex(square, torch.zeros_like(square))
        if attention.form == "slack":
            query = (a + b) * z * (1 - 1j) / 2
            echo = (a - b) * z * (1 + 1j) / 2
    else:
        initial, query, key = z, z, pairs(k[0])
    return Factors(index, query, key, initial, echo, attention.rotary, scale, attention.spec.window)


def rotary_layers(model: FarspanForCausalLM, wanted: Collection[int] | None = None) -> list[int]:
    """List the layers whose scores rotate with position, or those of them that were asked for."""
    require(model.config.causal, "model must be causal, got a bidirectional encoder")
    specs = model.config.attention_specs
    found = [i for i, spec in enumerate(specs) if spec.rotary and spec.kind in ("rope", "coca")]
    kinds = ", ".join(dict.fromkeys(spec.name for spec in specs))
    require(bool(found), f"model must have rotary layers with a softmax to analyze, got {kinds}; choose RoPE or CoCA")
    for layer in wanted or ():
        require(layer in found, f"layers must be rotary layers of this model {tuple(found)}, got {layer}")
    return found if wanted is None else sorted(set(wanted))


@torch.no_grad()
def walk(
    model: FarspanForCausalLM, tokens: Tensor, layers: Collection[int], visit: Callable[[Factors], None]
) -> Tensor:
    """Run a model over one sequence (m) and return the last hidden states.

    `visit` gets the factors of each chosen layer: the queries and keys of one layer exist at a time.

    >>> from farspan import FarspanConfig
    >>> model = FarspanForCausalLM(FarspanConfig.preset("tiny", attention="rope"))
    >>> out = walk(model, torch.arange(9), [0, 3], lambda made: print(made.layer, tuple(made.query.shape)))
    0 (4, 9, 16)
    3 (4, 9, 16)
    """
    broken = "activations must be finite, got NaN or inf {}; check the checkpoint and its dtype"
    hidden = model.model.embed_tokens(tokens[None].to(model.device))
    context = model.model.context(hidden, rotary_length=tokens.shape[0])
    for index, block in enumerate(model.model.layers):
        if index in layers:
            q, k = block.self_attn.project(block.input_layernorm(hidden))[:2]
            require(bool(q.isfinite().all() and k.isfinite().all()), broken.format(f"in layer {index}"))
            made = factors(block.self_attn, index, q, k)
            del q, k  # at long lengths they are most of the memory
            visit(made)
            del made
        hidden = block(hidden, context)
    hidden = model.model.norm(hidden)
    require(bool(hidden.isfinite().all()), broken.format("after the last layer"))
    return hidden


def scaled(rotary: Rotary, method: str, factor: float, train_length: int) -> Rotary:
    """Return the rotary under a scaling method; "none" leaves it as it is.

    >>> scaled(Rotary(4), "linear", 2.0, 64).frequencies()
    tensor([0.5000, 0.0050], dtype=torch.float64)
    """
    scalings: dict[str, Scaling] = {
        "linear": Linear(factor),
        "ntk": NTK(factor),
        "dynamic_ntk": DynamicNTK(factor, train_length),
        "yarn": YaRN(factor, train_length),
    }
    return rotary if method == "none" else Rotary(rotary.dim, rotary.base, scalings[method])
