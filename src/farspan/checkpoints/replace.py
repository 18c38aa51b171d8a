"""Give layers of a RoPE model another attention: which layers get which, and the weights they start from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from farspan.configuration_farspan import FarspanConfig
from farspan.errors import require, require_choice
from farspan.layers import HYBRIDS, NAMES, Attention, AttentionSpec, hybrid
from farspan.modeling_farspan import FarspanForCausalLM, make_attention
from farspan.ops.masking import make_mask
from farspan.ops.reference import repeat_heads
from farspan.utils import Progress, silent

KINDS = ("rope", "coca", "pope")
"""Kinds that can start from the weights of a RoPE layer."""
WINDOW, GLOBAL_EVERY = 512, 4
AUTO = "auto"
QUERIES = 256
"""Queries per block when attention is measured, to bound memory."""


@dataclass(frozen=True)
class Target:
    """The attention that the layers of a model get.

    Args:
        attention: None keeps the layers. A name ("rope", "coca-exact", "coca-slack", "coca-strict", "coca-polar",
            "pope") keeps each layer's window and rotation. A hybrid ("hybrid-rope", "hybrid-coca-exact",
            "hybrid-coca-polar", "hybrid-pope") has window layers of that kind and global layers without positions.
        window, global_every: of a hybrid, the keys in a window (512), and the layers per global layer (4).
        global_layers: the global layers by number, in place of `global_every`, or "auto": as many as `global_every`
            gives, those whose attention reaches furthest (:func:`attention_reach`).

    >>> config = FarspanConfig.preset("tiny", attention="rope")
    >>> [(s.window, s.rotary) for s in Target("hybrid-rope", window=8, global_layers=[1]).specs(config)]
    [(8, True), (None, False), (8, True), (8, True)]
    """

    attention: str | None = "rope"
    window: int | None = None
    global_every: int | None = None
    global_layers: Sequence[int] | str | None = None

    def __post_init__(self) -> None:
        if self.attention is not None:
            require_choice("attention", self.attention, [*NAMES, *HYBRIDS])
        require(
            self.hybrid or (self.window, self.global_every, self.global_layers) == (None, None, None),
            "window, global_every and global_layers need attention, the name of a hybrid, "
            f"got {self.attention!r}; give for example 'hybrid-rope'",
        )
        require(
            self.global_every is None or self.global_layers in (None, AUTO),
            f"give global_every or global_layers, got {self.global_every} and {self.global_layers}",
        )

    @property
    def hybrid(self) -> bool:
        """Whether the target is a layout of window layers and global layers."""
        return self.attention in HYBRIDS

    @property
    def keys(self) -> int:
        """The window of a hybrid."""
        return WINDOW if self.window is None else self.window

    def specs(self, config: FarspanConfig) -> tuple[AttentionSpec, ...]:
        """Return one spec per layer for a model of this configuration; "auto" counts as the pattern."""
        source = config.attention_specs
        if self.attention is None:
            return tuple(source)
        new = AttentionSpec.parse(HYBRIDS.get(self.attention, self.attention))
        require(
            new.kind in KINDS,
            f"attention must be rope, CoCA with a softmax or PoPE in a conversion, got {self.attention!r}; "
            "train a model with it instead",
        )
        if self.hybrid:
            return self._layout(new, config)
        return tuple(replace(new, window=old.window, rotary=old.rotary) for old in source)

    def _layout(self, local: AttentionSpec, config: FarspanConfig) -> tuple[AttentionSpec, ...]:
        """Return window layers of the kind `local`, and global layers without positions."""
        source, layers = config.attention_specs, config.num_hidden_layers
        require(
            1 <= self.keys <= config.train_length,
            f"window must be 1 … {config.train_length}, the training length, got {self.keys}; give a shorter window",
        )
        require(
            all(spec.window is None for spec in source),
            "a hybrid needs a checkpoint without windows of its own, got one with windows; "
            "convert it with attention 'rope', or choose another checkpoint",
        )
        local, everywhere = replace(local, window=self.keys), AttentionSpec("rope", rotary=False)
        if self.global_layers is None or self.global_layers == AUTO:
            every = GLOBAL_EVERY if self.global_every is None else self.global_every
            pattern = hybrid(str(self.attention), layers, global_every=every)
            chosen = [layer for layer, spec in enumerate(pattern) if spec == everywhere]
        else:
            chosen = list(self.global_layers)  # type: ignore[arg-type]
        require(
            0 < len(set(chosen)) < layers and all(type(one) is int and 0 <= one < layers for one in chosen),
            f"global_layers must be 'auto', or at least 1 and at most {layers - 1} of the layers 0 … {layers - 1}, "
            f"got {self.global_layers!r}",
        )
        free = [i for i, spec in enumerate(source) if not spec.rotary and i not in chosen]
        require(
            not free or self.global_layers == AUTO,
            f"layers {free} of the checkpoint have no positions and must be global, got {sorted(chosen)}; "
            "add them to global_layers",
        )
        return tuple(everywhere if layer in chosen else local for layer in range(layers))

    def measured(
        self, model: FarspanForCausalLM, ids: Tensor, progress: Progress = silent
    ) -> tuple["Target", list[float]]:
        """Replace "auto" by the layers that reach furthest in ids (sequences, length); return also each layer's reach.

        Layers that have no positions yet are global in any case.
        """
        specs, count = model.config.attention_specs, sum(spec.window is None for spec in self.specs(model.config))
        reach = attention_reach(model, ids, self.keys, progress)
        order = sorted(range(len(specs)), key=lambda layer: (specs[layer].rotary, -reach[layer]))
        count = max(count, sum(not spec.rotary for spec in specs))
        return Target(self.attention, self.window, None, tuple(sorted(order[:count]))), reach


@torch.no_grad()
def attention_reach(model: FarspanForCausalLM, ids: Tensor, window: int, progress: Progress = silent) -> list[float]:
    """Measure how far each layer attends past a window: attention mass × distance over keys further away, in tokens.

    The mean over heads, over queries with such keys, and over ids (sequences, length).

    >>> model = FarspanForCausalLM(FarspanConfig.preset("tiny", attention="rope"))
    >>> [reach > 0 for reach in attention_reach(model, torch.randint(0, 512, (2, 32)), 8)]
    [True, True, True, True]
    """
    require(
        ids.shape[1] > window,
        f"sequences must be longer than the window to measure reach, got {ids.shape[1]} tokens and window {window}; "
        "give a shorter window, or name the layers in global_layers",
    )
    reach = [0.0] * model.config.num_hidden_layers
    for number, row in enumerate(ids[:, None].to(model.device)):
        hidden = model.model.embed_tokens(row)
        context = model.model.context(hidden)
        for index, block in enumerate(model.model.layers):
            reach[index] += _layer_reach(block.self_attn, block.input_layernorm(hidden), window) / len(ids)
            hidden = block(hidden, context)
            done = number * len(reach) + index + 1
            progress(done, len(ids) * len(reach), "measuring reach", phase="measuring reach")
    return reach


def _layer_reach(layer: Attention, x: Tensor, window: int) -> float:
    q, k, _ = layer.project(x)
    n, total = x.shape[1], 0.0
    q, k = layer.features(q, k, make_mask(n, n, 1, x.device), layer.rotary)
    k = repeat_heads(k, layer.num_heads).float()
    for start in range(window, n, QUERIES):
        queries = torch.arange(start, min(start + QUERIES, n), device=x.device)
        distance = queries[:, None] - torch.arange(n, device=x.device)
        scores = q[:, :, queries].float() @ k.mT * layer.scaling
        weights = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
        total += float((weights * distance.masked_fill(distance < window, 0)).sum())
    return total / (layer.num_heads * (n - window))


def replace_attention(model: FarspanForCausalLM, layer: int, spec: AttentionSpec) -> Attention:
    """Give one layer of a RoPE model another attention, started from its weights; return the new module.

    RoPE with another window or without rotation keeps all weights. Where a projection has half the outputs, it starts
    as the mean of the two halves of each head: the authors' code makes the same of a LLaMA checkpoint. That is W_T from
    W_K, and W_Q of strict and polar CoCA. Phases start at 0. Norms of q and k become norms of q and t alike: they bound
    scores that are cubic in activations, as the source's bound scores that are quadratic.
    """
    config = model.config
    old: Attention = model.model.layers[layer].self_attn
    specs = list(config.attention_specs)
    require(
        specs[layer].kind == "rope",
        f"layer {layer} must be rope to become {spec.name}, got {specs[layer].name!r}; start from the original",
    )
    specs[layer] = spec
    config.attention = [one.to_dict() for one in specs]
    weight = old.q_proj.weight
    with torch.device("meta"):
        new = make_attention(config, spec)
    sources = {name: tensor.detach() for name, tensor in old.named_parameters()}
    for name, parameter in list(new.named_parameters()):
        from_ = sources.get(name.replace("t_proj", "k_proj").replace("t_norm", "k_norm"))
        value = torch.zeros(parameter.shape, device=weight.device) if from_ is None else from_
        if value.shape != parameter.shape:  # (heads·d, …) → (heads·d/2, …): the mean of the members of each pair
            value = value.unflatten(0, (-1, 2, old.head_dim // 2)).mean(1).flatten(0, 1)
        owner, _, leaf = name.rpartition(".")
        setattr(new.get_submodule(owner), leaf, nn.Parameter(value.to(weight.dtype, copy=True)))
    new.train(old.training)
    model.model.layers[layer].set_attention(new)
    return new
