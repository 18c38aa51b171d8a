"""Another attention in place of a layer's RoPE, with the weights it can start from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from farspan.errors import require
from farspan.layers import Attention, AttentionSpec
from farspan.modeling_farspan import FarspanForCausalLM, make_attention

Entry = str | Mapping[str, Any] | AttentionSpec
AttentionArgument = Entry | Sequence[Entry]


def target_specs(attention: AttentionArgument, source: Sequence[AttentionSpec]) -> tuple[AttentionSpec, ...]:
    """One spec a layer. A name keeps the source layer's window and rotation; a mapping says all itself.

    >>> source = [AttentionSpec("rope", window=8), AttentionSpec("rope")]
    >>> [spec.window for spec in target_specs("coca-exact", source)]
    [8, None]
    """
    entries = [attention] * len(source) if isinstance(attention, str | Mapping | AttentionSpec) else list(attention)
    require(
        len(entries) == len(source),
        f"attention must have one entry for each of the {len(source)} layers, got {len(entries)}; repeat the pattern",
    )
    specs = []
    for entry, old in zip(entries, source, strict=True):
        spec = AttentionSpec.parse(entry)
        require(
            spec.kind in ("rope", "coca"),
            f"attention must be rope or CoCA with a softmax after a conversion, got {spec.name!r}; "
            "train a model with it instead",
        )
        if isinstance(entry, str):
            spec = AttentionSpec(spec.kind, spec.form, old.window, old.rotary)
        specs.append(spec)
    return tuple(specs)


@dataclass(frozen=True)
class Target:
    """What the layers of a model are to become.

    Args:
        attention: as :func:`target_specs` takes it; None leaves them as they are.
        window: every layer sees so many keys (:func:`local_and_global`).
        global_every: but the last of so many layers all of them, without positions.
        keep_rope: after calibration, so many of the worst layers are put back as they were.

    >>> [spec.window for spec in Target("coca-exact", window=8, global_every=2).specs([AttentionSpec("rope")] * 2)]
    [8, None]
    """

    attention: AttentionArgument | None = "rope"
    window: int | None = None
    global_every: int = 0
    keep_rope: int = 0

    def __post_init__(self) -> None:
        require(
            self.window is not None or self.global_every == 0,
            f"global_every needs window, what the other layers see, got {self.global_every} without; give one, say 512",
        )
        require(
            self.window is None or self.keep_rope == 0,
            f"keep_rope gives layers their whole text back, got {self.keep_rope} and window {self.window}; "
            "leave out one of them",
        )

    def specs(self, source: Sequence[AttentionSpec]) -> tuple[AttentionSpec, ...]:
        """One spec a layer, for a model that has `source`."""
        if self.window is not None:
            return tuple(local_and_global(self.attention, len(source), self.window, self.global_every))
        return tuple(source) if self.attention is None else target_specs(self.attention, source)


def local_and_global(
    attention: AttentionArgument | None, layers: int, window: int, every: int = 0
) -> list[AttentionSpec]:
    """Layers that see the last `window` keys, and of each `every` the last one sees all of them, without positions.

    Past the training length nothing is new to the ones, and no angle to the others.

    >>> [(spec.window, spec.rotary) for spec in local_and_global("coca-exact", 4, 512, 2)]
    [(512, True), (None, False), (512, True), (None, False)]
    """
    if not isinstance(attention, str):
        raise ValueError(
            f"window needs attention, one name for all layers, got {attention!r}; give for example 'coca-exact'"
        )
    require(
        every == 0 or 2 <= every <= layers,
        f"global_every must be 2 … {layers}, the number of layers, got {every}; 0 leaves every layer its window",
    )
    spec = AttentionSpec.parse(attention)
    local, everywhere = replace(spec, window=window), replace(spec, rotary=False)
    return [everywhere if every and index % every == every - 1 else local for index in range(layers)]


def replace_attention(model: FarspanForCausalLM, layer: int, spec: AttentionSpec) -> Attention:
    """Give one layer of a rope model another attention, started from its weights; returns the new module.

    W_T starts as the mean of the two halves of each head's W_K, which is what the authors' code makes of a LLaMA
    checkpoint: they load W_K into a projection whose halves are averaged before the ReLU. Strict CoCA's tied W_Q starts
    as the mean of the halves of W_Q. Norms of q and k become norms of q and t alike: they bound scores that are
    cubic in activations, as the source's bound scores that are quadratic.
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
        from_ = sources[name.replace("t_proj", "k_proj").replace("t_norm", "k_norm")]
        value = from_ if from_.shape == parameter.shape else _mean_of_halves(from_, old.head_dim)
        owner, _, leaf = name.rpartition(".")
        setattr(new.get_submodule(owner), leaf, nn.Parameter(value.to(weight.dtype, copy=True)))
    new.train(old.training)
    model.model.layers[layer].set_attention(new)
    return new


def restore_attention(model: FarspanForCausalLM, layer: int, original: Attention) -> None:
    """Put back what :func:`replace_attention` took out."""
    specs = list(model.config.attention_specs)
    specs[layer] = original.spec
    model.config.attention = [one.to_dict() for one in specs]
    model.model.layers[layer].set_attention(original)


def _mean_of_halves(x: Tensor, width: int) -> Tensor:
    """(heads·d, …) → (heads·d/2, …): the mean of the two members of each pair."""
    return x.unflatten(0, (-1, 2, width // 2)).mean(1).flatten(0, 1)
