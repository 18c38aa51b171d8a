"""Helpers of the cosFormer tests: the difference from the definition, and a stream of calls."""

import torch

from farspan.ops import cosformer_attention, cosformer_attention_reference
from farspan.ops.cosformer import BEYOND
from tests.helpers import largest_difference

PAST_M = [beyond for beyond in BEYOND if beyond != "raise"]


def differs(inputs: tuple[torch.Tensor, ...], **options: object) -> float:
    """Return the largest difference from the definition, outputs and gradients."""
    return largest_difference(cosformer_attention, cosformer_attention_reference, inputs, **options)


def in_pieces(
    inputs: tuple[torch.Tensor, ...], pieces: int | list[int], **options: object
) -> tuple[torch.Tensor, object]:
    """Return the outputs of a stream of calls, each continuing the last, and the last state."""
    state, parts = None, []
    mask = options.pop("padding_mask", None)
    masks_ = [None] * inputs[0].shape[2] if mask is None else mask.split(pieces, dim=1)
    for q, k, v, keep in zip(*(x.split(pieces, dim=2) for x in inputs), masks_, strict=False):
        out, state = cosformer_attention(q, k, v, state=state, return_state=True, padding_mask=keep, **options)
        parts.append(out)
    return torch.cat(parts, dim=2), state
