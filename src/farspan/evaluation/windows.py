"""How a text is cut into windows, and which of a window's tokens count: the conventions people mean by "perplexity".

::

    sliding   window 4, stride 2        tokens  0 1 2 3 4 5 6 7      . = context only, ■ = scored (token 0 has none)
                                                . ■ ■ ■
                                                    . . ■ ■
                                                        . . ■ ■

========== ======================================================================================================
sliding    Press et al. 2022, the CoCA paper (stride 512): each token is scored once, with the longest context the
           window allows; perplexity = exp(sum of losses / number of tokens). With stride = window the first token of a
           window has no context and is left out, as in the published scripts
yarn       the same windows, but perplexity = exp(mean of the windows' mean losses), as in YaRN's script
whole      LongLoRA's script: the same windows, every token of every window scored
disjoint   windows side by side (stride = window), every token scored
truncated  the control for any of them: the same tokens, context cut to the training length
========== ======================================================================================================
"""

from collections.abc import Iterator
from typing import NamedTuple

from farspan.errors import require, require_choice

MODES = ("sliding", "yarn", "whole", "disjoint", "truncated")


class Window(NamedTuple):
    """Tokens begin … end-1 are read; those from `score_from` on are scored."""

    begin: int
    end: int
    score_from: int


def windows(tokens: int, length: int, stride: int, mode: str = "sliding") -> Iterator[Window]:
    """Cut a text of so many tokens into windows.

    >>> [tuple(w) for w in windows(8, 4, 2)]
    [(0, 4, 1), (2, 6, 4), (4, 8, 6)]
    """
    require_choice("mode", mode, MODES)
    require(length >= 2, f"length must be at least 2 to predict a token, got {length}; use the training length or more")
    require(
        1 <= stride <= length,
        f"stride must lie between 1 and the window length {length}, got {stride}; the paper uses 512",
    )
    if mode == "disjoint":
        stride = length
    scored = 1
    for begin in range(0, tokens, stride):
        end = min(begin + length, tokens)
        first = begin + 1 if mode in ("whole", "disjoint") else max(scored, begin + 1)
        if first < end:
            yield Window(begin, end, first)
        scored = end
        if end == tokens:
            return


def truncation_control(trained: int) -> tuple[int, int, str]:
    """Length, stride and mode of the control: no context past the training length, and at least ¾ of it.

    >>> truncation_control(512)
    (512, 128, 'truncated')
    """
    return trained, max(1, trained // 4), "truncated"
