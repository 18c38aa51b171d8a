"""ListOps as the Long Range Arena has it: nested list operations of 500 to 2000 tokens, answered by one digit.

A node is an operator with probability 1/4, with 2 to 10 arguments, unless nine operators are already around it;
otherwise a digit. Expressions whose length is not strictly between the bounds are thrown away, and no expression is
given twice. Tokens are operators, digits and closing brackets; the published files' round brackets carry nothing and
its reader drops them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from farspan.errors import require

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
"""Least, greatest, median (rounded down), and sum modulo 10."""
TOKENS = ("<pad>", *OPERATORS, "]", *(str(digit) for digit in range(10)))
"""A token's id is its place here."""
END = TOKENS.index("]")
ZERO = TOKENS.index("0")
LABELS = 10
TRIES = 200_000
"""Proposals in a row without a new expression, before there are said to be no more. Of the published ones, one in
twelve is kept."""


class Expression(NamedTuple):
    """Token ids, and the digit they come to."""

    tokens: list[int]
    value: int

    def __str__(self) -> str:
        return " ".join(TOKENS[token] for token in self.tokens)


class _TooLongError(Exception):
    """The expression in the making has left the bounds."""


@dataclass(frozen=True)
class ListOps:
    """The distribution of expressions; the defaults are the published ones.

    >>> expression = next(ListOps(min_length=5, max_length=20).stream(seed=3))
    >>> evaluate(expression.tokens) == expression.value
    True
    """

    max_depth: int = 10
    max_args: int = 10
    min_length: int = 500
    max_length: int = 2000
    operator_share: float = 0.25

    def __post_init__(self) -> None:
        require(
            self.max_depth >= 2 and self.max_args >= 2,
            f"max_depth and max_args must be at least 2, got {self.max_depth} and {self.max_args}",
        )
        require(
            self.min_length >= 0 and self.min_length + 1 < self.max_length,
            f"lengths lie strictly between min_length and max_length, got {self.min_length} and {self.max_length}",
        )

    def stream(self, seed: int) -> Iterator[Expression]:
        """Distinct accepted expressions, as many as there are to find; the same for the same seed."""
        random, seen, tries = Random(seed), set[bytes](), 0
        while True:
            tries += 1
            require(
                tries <= TRIES,
                f"lengths between min_length and max_length must leave more expressions, got {self.min_length} and "
                f"{self.max_length}, where {TRIES:,} tries after {len(seen)} found no other; widen them",
            )
            expression = self.propose(random)
            if expression is not None and len(expression.tokens) > self.min_length:
                key = bytes(expression.tokens)
                if key not in seen:
                    seen.add(key)
                    tries = 0
                    yield expression

    def propose(self, random: Random) -> Expression | None:
        """One expression of any length below `max_length`; None where it would be longer."""
        tokens: list[int] = []
        try:
            value = self._grow(tokens, 1, random)
        except _TooLongError:
            return None
        return Expression(tokens, value)

    def _grow(self, tokens: list[int], depth: int, random: Random) -> int:
        """Append one node's tokens and return its value."""
        if len(tokens) >= self.max_length - 1:
            raise _TooLongError
        if depth >= self.max_depth or random.random() > self.operator_share:
            digit = random.randrange(10)
            tokens.append(ZERO + digit)
            return digit
        operator = random.choice(OPERATORS)
        tokens.append(TOKENS.index(operator))
        values = [self._grow(tokens, depth + 1, random) for _ in range(random.randint(2, self.max_args))]
        tokens.append(END)
        if len(tokens) >= self.max_length:
            raise _TooLongError
        return _apply(operator, values)

    def length_distribution(self) -> NDArray[np.float64]:
        """The exact probability of each length 0 … max_length - 1 before rejection; what is missing to 1 is longer.

        A node at the last depth has length 1. One level up, the generating function is
        P(x) = (1-p)·x + p·x²·Σ_k P_below(x)^k / (max_args - 1), k = 2 … max_args.
        """
        size = self.max_length
        below = np.zeros(size)
        below[1] = 1.0
        for _ in range(self.max_depth - 1):
            power, total = below, np.zeros(size)
            for _ in range(2, self.max_args + 1):
                power = _product(power, below)
                total += power
            here = np.zeros(size)
            here[1] = 1 - self.operator_share
            here[2:] += self.operator_share / (self.max_args - 1) * total[:-2]
            below = here
        return below

    def acceptance(self) -> float:
        """The share of proposals that is kept (before duplicates)."""
        return float(self.length_distribution()[self.min_length + 1 :].sum())


def evaluate(tokens: list[int]) -> int:
    """The value of an expression, read from its tokens alone.

    >>> evaluate([TOKENS.index(word) for word in "[MAX 2 [SM 7 8 ] 4 ]".split()])
    5
    """
    stack: list[list[int | str]] = [[]]
    for token in tokens:
        if TOKENS[token] in OPERATORS:
            stack.append([TOKENS[token]])
        elif token == END:
            operator, *values = stack.pop()
            stack[-1].append(_apply(str(operator), [int(value) for value in values]))
        else:
            stack[-1].append(token - ZERO)
    require(
        len(stack) == 1 and len(stack[0]) == 1, "tokens must be one whole expression; a bracket is missing or too many"
    )
    return int(stack[0][0])


def _apply(operator: str, values: list[int]) -> int:
    results = {"[MIN": min, "[MAX": max, "[MED": lambda x: int(median(x)), "[SM": lambda x: sum(x) % 10}
    return results[operator](values)  # type: ignore[operator]


def _product(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """The distribution of a sum of two lengths, as far as the bound."""
    return np.convolve(a, b)[: len(a)]
