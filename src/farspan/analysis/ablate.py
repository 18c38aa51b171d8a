"""What one head is worth, inside and past the training length: the loss without it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from farspan.analysis.drift import band
from farspan.evaluation.perplexity import token_losses
from farspan.modeling_farspan import FarspanForCausalLM


@torch.no_grad()
def head_worth(
    model: FarspanForCausalLM,
    text: Tensor,
    layers: Sequence[int],
    lengths: Sequence[int],
    report: Callable[[int, int, str], None] | None = None,
) -> Tensor:
    """How much the loss rises when one head alone is silenced: (layers, h, lengths), in nats a token.

    A negative value is a head that the model does better without. One pass over the text (n,) for each head, from its
    layer on: what lies before is the same for all heads of the layer. `layers` must rise.

    >>> from farspan import FarspanConfig
    >>> model = FarspanForCausalLM(FarspanConfig.preset("tiny", attention="rope", num_hidden_layers=1))
    >>> head_worth(model, torch.arange(128), [0], [64, 128]).shape
    torch.Size([1, 4, 2])
    """
    ids = text[: min(max(lengths), text.shape[0] - 1) + 1].to(model.device)
    blocks, heads = model.model.layers, model.config.num_attention_heads
    entering = model.model.embed_tokens(ids[None, :-1])
    whole = _losses(model, ids, _after(model, blocks, entering), lengths)
    found = torch.zeros(len(layers), heads, len(lengths), dtype=torch.float64)
    reached = 0
    for i, layer in enumerate(layers):
        entering, reached = _after(model, blocks[reached:layer], entering, normed=False), layer
        attention: Any = blocks[layer].self_attn
        for head in range(heads):
            columns = slice(head * attention.head_dim, (head + 1) * attention.head_dim)
            hook = attention.o_proj.register_forward_pre_hook(lambda m, a, c=columns: _silenced(m, a, c))
            try:
                found[i, head] = _losses(model, ids, _after(model, blocks[layer:], entering), lengths) - whole
            finally:
                hook.remove()
            if report is not None:
                report(i * heads + head + 1, len(layers) * heads, f"without layer {layer}, head {head}")
    return found


def _after(model: FarspanForCausalLM, blocks: nn.ModuleList, hidden: Tensor, *, normed: bool = True) -> Tensor:
    """Run hidden states (1, n, width) through these blocks and, if `normed`, through the final norm."""
    context = model.model.context(hidden, rotary_length=hidden.shape[1] + 1)
    for block in blocks:
        hidden = block(hidden, context)
    return model.model.norm(hidden) if normed else hidden


def _silenced(_: nn.Module, arguments: tuple[Tensor, ...], columns: slice) -> tuple[Tensor, ...]:
    mixed = arguments[0].clone()
    mixed[..., columns] = 0.0
    return (mixed, *arguments[1:])


def _losses(model: FarspanForCausalLM, ids: Tensor, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
    """Mean loss of each length's band, (lengths) float64."""
    means = []
    for length in lengths:
        first, end = band(length, model.config.train_length)
        end = min(end, hidden.shape[1])
        means.append(token_losses(model, hidden[:, first:end], ids[None, first + 1 : end + 1]).double().mean())
    return torch.stack(means).cpu()
