"""Passkey documents: a five-digit number hidden in filler, asked for at the end (CoCA paper, App. B)."""

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np

from farspan.errors import require

# The paper's wording, its spelling included.
INTRODUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there.\n"
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
KEY = "The passkey is {key}. Remeber it. {key} is the passkey.\n"
QUESTION = "What is the passkey?"
ANSWER = " The passkey is {key}."

ONE_DOCUMENT = 1024
"""A training row of at most so many tokens is one passkey document."""


class Tokenizer(Protocol):
    """The methods of a tokenizer that the task uses."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class Case(NamedTuple):
    """A prompt of exactly the wanted length, the number hidden in it, and its distance from the end."""

    prompt: list[int]
    key: int
    distance: int
    """Tokens from the end of the key's sentence to the end of the prompt."""


def make_case(tokenizer: Tokenizer, length: int, key: int, depth: float) -> Case:
    """Make a prompt of `length` tokens with the key at `depth` of the filler (0 = first, 1 = last).

    Filler is cut to the token, so that prompts of one length need no padding.
    """
    head, question = tokenizer.encode(INTRODUCTION), tokenizer.encode(QUESTION)
    hidden, filler = tokenizer.encode(KEY.format(key=key)), tokenizer.encode(FILLER)
    spare = length - len(head) - len(hidden) - len(question)
    require(
        spare >= 0,
        f"length must be at least {length - spare} tokens for the passkey prompt with this tokenizer, got {length}; "
        "use a longer one",
    )
    before = round(spare * depth)
    stream = filler * (spare // len(filler) + 1)
    prompt = head + stream[:before] + hidden + stream[: spare - before] + question
    return Case(prompt, key, spare - before + len(question))


def make_cases(tokenizer: Tokenizer, length: int, cases: int, seed: int) -> list[Case]:
    """Make prompts with depths spread evenly over the filler, in an order that depends on the seed alone."""
    generator = np.random.default_rng([seed, length])
    keys = generator.integers(10_000, 100_000, cases)
    depths = (generator.permutation(cases) + generator.random(cases)) / cases
    return [make_case(tokenizer, length, int(key), float(depth)) for key, depth in zip(keys, depths, strict=True)]


def training_document(tokenizer: Tokenizer, generator: np.random.Generator, length: int) -> np.ndarray[Any, Any]:
    """Make a passkey document of `length` tokens with its answer: small models learn retrieval from nothing less."""
    key = int(generator.integers(10_000, 100_000))
    answer = tokenizer.encode(ANSWER.format(key=key))
    case = make_case(tokenizer, length - len(answer), key, float(generator.random()))
    return np.array(case.prompt + answer, dtype=np.int64)


def check_prompt(tokenizer: Tokenizer, length: int, name: str) -> None:
    """Raise if some key would not fit into a prompt of this length; `name` is what the user calls it."""
    fewest = _fewest(tokenizer, INTRODUCTION, KEY, QUESTION)
    need = f"{name} must be at least {fewest} tokens for a passkey prompt with this tokenizer"
    require(length >= fewest, f"{need}, got {length}; use a longer one")


def check_row(tokenizer: Tokenizer, length: int, name: str) -> None:
    """Raise if a passkey document would not fit into training rows (`length` tokens and the one after)."""
    fewest = _fewest(tokenizer, INTRODUCTION, KEY, QUESTION, ANSWER) - 1
    need = f"{name} must be at least {fewest} tokens for a passkey text with this tokenizer"
    require(length >= fewest, f"{need}, got {length}; use longer rows, or passkey_share = 0")


def _fewest(tokenizer: Tokenizer, *parts: str, keys: Iterable[int] = range(10_000, 100_000, 997)) -> int:
    """Count tokens without filler: the most over the keys, as their digits may be one token or five."""
    return max(sum(len(tokenizer.encode(part.format(key=key))) for part in parts) for key in keys)


def training_row(tokenizer: Tokenizer, generator: np.random.Generator, length: int) -> np.ndarray[Any, Any]:
    """Make a training row of `length` tokens: one passkey document, or in half of the long rows several shorter ones.

    Only the answers teach anything, and one in 8192 tokens teaches slowly: rows of several documents give many answers,
    about near keys, and the others few, about far ones.
    """
    pieces, left = [], length
    shortest = 2 * _fewest(tokenizer, INTRODUCTION, KEY, QUESTION, ANSWER, keys=[10_000])
    several = length > ONE_DOCUMENT and generator.random() < 0.5
    while several and left > shortest:
        size = round(shortest * (left / shortest) ** generator.random())
        if left - size < shortest:
            break
        pieces.append(training_document(tokenizer, generator, size))
        left -= size
    return np.concatenate([*pieces, training_document(tokenizer, generator, left)])
