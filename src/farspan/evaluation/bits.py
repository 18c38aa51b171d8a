"""Bits a byte: how much a model says about raw text, whatever its tokens."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from farspan.errors import require
from farspan.evaluation.perplexity import perplexity
from farspan.modeling_farspan import FarspanForCausalLM


def first_bytes(text: str, count: int) -> str:
    """The beginning of a text, of at most so many bytes of UTF-8, cut between characters.

    >>> first_bytes("aé", 2), first_bytes("aé", 3)
    ('a', 'aé')
    """
    return text.encode()[:count].decode(errors="ignore")


def start_token(model: FarspanForCausalLM, end: int) -> int:
    """The token before a text: the model's own beginning, else `end`, the end of the text before."""
    begin = model.config.bos_token_id
    return end if begin is None else int(begin)


def bits_per_byte(
    model: FarspanForCausalLM,
    texts: Sequence[str],
    encode: Callable[[str], list[int]],
    *,
    start: int,
    length: int,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """A row ``length, stride, nll, tokens, bytes, texts, bits_per_byte``.

    Every byte counts once: the token `start` stands before each text, so that its first token is scored too. Texts are
    read in windows of `length` tokens, each half over the one before.

    Args:
        encode: text → token ids, without special tokens.
        progress: called with the number of bytes done after each text.
    """
    require(bool(texts), "texts must hold at least one text, got none; name another file")
    require(length >= 2, f"length must be at least 2 to predict a token, got {length}; use the training length")
    stride, nll, tokens, size = length // 2, 0.0, 0, 0
    for text in texts:
        ids = torch.tensor([start, *encode(text)])
        row = perplexity(model, [ids], length=min(length, len(ids)), stride=min(stride, len(ids) - 1))
        nll, tokens, size = nll + float(row["nll"]), tokens + int(row["tokens"]), size + len(text.encode())
        if progress is not None:
            progress(len(text.encode()))
    bits = nll / math.log(2) / size
    return {
        "length": length,
        "stride": stride,
        "nll": nll,
        "tokens": tokens,
        "bytes": size,
        "texts": len(texts),
        "bits_per_byte": bits,
    }
