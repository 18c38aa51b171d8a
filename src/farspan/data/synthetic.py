"""Generated tasks: ListOps and Pathfinder of the Long Range Arena, and multi-query associative recall (MQAR).

Each is a distribution with the published numbers as defaults, and gives the same examples for the same seed.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from farspan.errors import require

Points = NDArray[np.float64]
Count = Annotated[int, Field(ge=0)]
AtLeastTwo = Annotated[int, Field(ge=2)]


# ListOps: nested list operations, answered by one digit

OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(median(values)),
    "[SM": lambda values: sum(values) % 10,
}
TOKENS = ("<pad>", *OPERATORS, "]", *(str(digit) for digit in range(10)))
"""The id of a token is its index here."""
END = TOKENS.index("]")
ZERO = TOKENS.index("0")
OPERATOR_SHARE = 0.25
TRIES = 200_000
"""Proposals without a new expression before the generator gives up. Of the published ones, one in twelve is kept."""


class Expression(NamedTuple):
    """Token ids, and the digit they evaluate to."""

    tokens: list[int]
    value: int


@dataclass(frozen=True)
class ListOps:
    """The distribution of expressions.

    A node is an operator with probability 1/4, with 2 to 10 arguments, unless nine operators are already around it;
    otherwise a digit. Expressions whose length is not strictly between the bounds are dropped, and none is given twice.
    The round brackets of the published files carry nothing, and their reader drops them.

    >>> tokens, value = next(ListOps(min_length=5, max_length=20).stream(seed=3))
    >>> " ".join(TOKENS[token] for token in tokens), value
    ('[SM 6 4 6 8 9 ]', 3)
    """

    max_depth: AtLeastTwo = 10
    max_args: AtLeastTwo = 10
    min_length: Count = 500
    max_length: AtLeastTwo = 2000

    def __post_init__(self) -> None:
        require(
            self.min_length + 1 < self.max_length,
            f"lengths lie strictly between min_length and max_length, got {self.min_length} and {self.max_length}",
        )

    def stream(self, seed: int) -> Iterator[Expression]:
        """Yield distinct accepted expressions, as many as there are to find; the same for the same seed."""
        random, seen, tries = Random(seed), set[bytes](), 0
        while True:
            tries += 1
            require(
                tries <= TRIES,
                f"lengths between min_length and max_length must leave more expressions, got {self.min_length} and "
                f"{self.max_length}, where {TRIES:,} tries after {len(seen)} found no other; widen them",
            )
            found = self.propose(random)
            if found is not None and len(found.tokens) > self.min_length and bytes(found.tokens) not in seen:
                seen.add(bytes(found.tokens))
                tries = 0
                yield found

    def propose(self, random: Random) -> Expression | None:
        """Draw one expression of any length below `max_length`; None if it would be longer."""
        tokens = list[int]()
        value = self._grow(tokens, 1, random)
        return None if value is None else Expression(tokens, value)

    def _grow(self, tokens: list[int], depth: int, random: Random) -> int | None:
        """Append the tokens of one node, and return its value; None once there are too many."""
        if len(tokens) >= self.max_length - 1:
            return None
        if depth >= self.max_depth or random.random() > OPERATOR_SHARE:
            digit = random.randrange(10)
            tokens.append(ZERO + digit)
            return digit
        operator, values = random.choice([*OPERATORS]), list[int]()
        tokens.append(TOKENS.index(operator))
        for _ in range(random.randint(2, self.max_args)):
            value = self._grow(tokens, depth + 1, random)
            if value is None:
                return None
            values.append(value)
        tokens.append(END)
        return OPERATORS[operator](values) if len(tokens) < self.max_length else None


# Multi-query associative recall (Arora et al. 2023): the hard case for a memory of constant size

POWER = 0.01
"""Gaps g = 1, 2, … have weight g^(POWER-1): most keys come back soon."""


@dataclass(frozen=True)
class MQAR:
    """The task; defaults are the published setting at length 64 with 4 pairs.

    A sequence begins with key-value pairs. Later each key is asked once, after a gap of random length. Its value is the
    answer at that position and does not follow in the tokens. Filler elsewhere may happen to be a key too: answers tell
    them apart.

    >>> rows = MQAR(length=16, pairs=2, vocabulary=20).draw(1, seed=0)
    >>> rows.shape, int((rows[:, 16:] > 0).sum())
    ((1, 32), 2)
    """

    length: int = 64
    pairs: int = 4
    vocabulary: Annotated[int, Field(le=2**16)] = 8192
    """Keys are 1 … half-1, values half … end. Tables hold 16 bits per token."""

    def __post_init__(self) -> None:
        half = self.vocabulary // 2
        require(
            1 <= self.pairs < half,
            f"pairs must be between 1 and the {half - 1} keys of a vocabulary of {self.vocabulary}, got {self.pairs}",
        )
        require(
            self.length % 2 == 0 and 4 * self.pairs <= self.length,
            f"length must be even and at least 4 × pairs = {4 * self.pairs}, got {self.length}; "
            "each pair is shown and asked",
        )

    def draw(self, examples: int, seed: int) -> NDArray[np.int64]:
        """Draw rows (examples, 2 · length), tokens and then answers, 0 = nothing asked; the same for the same seed."""
        random, half = np.random.default_rng(seed), self.vocabulary // 2
        shown, space = 2 * self.pairs, (self.length - 2 * self.pairs) // 2
        weights = np.arange(1, space + 1, dtype=np.float64) ** (POWER - 1)
        weights /= weights.sum()
        rows = np.zeros((examples, 2 * self.length), dtype=np.int64)
        tokens, answers = np.split(rows, 2, axis=1)
        for row in range(examples):
            keys = random.choice(np.arange(1, half), self.pairs, replace=False)
            values = random.choice(np.arange(half, self.vocabulary), self.pairs, replace=False)
            asked = shown + 2 * random.choice(space, self.pairs, replace=False, p=weights)
            tokens[row, 0:shown:2], tokens[row, 1:shown:2] = keys, values
            tokens[row, asked], answers[row, asked] = keys, values
        empty = tokens == 0
        tokens[empty] = random.integers(self.vocabulary, size=int(empty.sum()))
        return rows


# Pathfinder

LEVELS = 256
"""Grey levels; a pixel's level is its token."""
DASH, GAP, WIDTH, DOT = 2.0, 1.0, 0.5, 1.5
"""Length of a dash, the gap to the next, width of a dash, and radius of a dot, in pixels."""
CONTRAST = 0.75
"""Brightness of a dash relative to a dot."""
BEND = math.pi / 3
"""Largest change of direction from one dash to the next."""
CLEARANCE = 2.5
"""Least distance of dashes that are not neighbours on a path: more than a gap."""
TOLERANCE = 1.0
"""Most that the two candidate pairs of ends may differ in distance."""
DIRECTIONS, PATHS, SCENES = 12, 20, 300
"""Directions tried for a dash, starts tried for a path, and scenes tried for an image."""


class Scene(NamedTuple):
    """Dashes of each path (k, 2 ends, x and y), the two long paths first; the two dots (2, 2); the label."""

    paths: list[Points]
    dots: Points
    label: int


@dataclass(frozen=True)
class Pathfinder:
    """The distribution of images of 32 × 32 grey pixels: are the two dots ends of one dashed path?

    An image has two long paths, shorter distractors, and two dots, each on an end of a long path: both on the same path
    (label 1), or one on each (label 0). Numbers are those published for the hardest level; bend and clearance are ours.

    Little but the paths reveals the label. A scene is drawn first, with one pair of ends on the same path and one pair
    on two paths, equally far apart. A fair coin then says which pair gets the dots. The dots still reveal a little:
    logistic regression on them was right in 53.1 ± 0.8%, since the pairs may differ in distance from the border.

    >>> pixels, label = Pathfinder().draw(seed=0, index=5)
    >>> pixels.shape, int(pixels.max()), label in (0, 1)
    ((32, 32), 255, True)
    """

    size: Annotated[int, Field(ge=6)] = 32
    dashes: AtLeastTwo = 14
    distractors: Count = 5
    distractor_dashes: Annotated[int, Field(ge=1)] = 4

    def draw(self, seed: int, index: int) -> tuple[NDArray[np.uint8], int]:
        """Draw image `index` of the set `seed`: grey levels (size, size) and its label."""
        scene = self.scene(seed, index)
        return self.render(scene), scene.label

    def scene(self, seed: int, index: int) -> Scene:
        """Draw the geometry of image `index`."""
        random = np.random.Generator(np.random.Philox(key=np.array([seed, 0], np.uint64), counter=[0, 0, 0, index]))
        for _ in range(SCENES):
            paths = self._add_paths([], 2, self.dashes, random)
            pairs = self._pairs(paths) if len(paths) == 2 else None
            if pairs is None:
                continue
            paths = self._add_paths(paths, self.distractors, self.distractor_dashes, random)
            if len(paths) == 2 + self.distractors:
                label = int(random.integers(2))
                return Scene(paths, pairs[label], label)
        raise ValueError(
            f"size must fit two paths of {self.dashes} dashes and {self.distractors} distractors, got "
            f"{self.size}, where {SCENES} tries found no such image; enlarge it or take fewer dashes"
        )

    def _pairs(self, paths: list[Points]) -> tuple[Points, Points] | None:
        """Return two ends on different paths and two on the same, as far apart from each other, if there are such."""
        (a, b), (c, d) = ((path[0, 0], path[-1, 1]) for path in paths)
        same = [np.stack(pair) for pair in ((a, b), (c, d))]
        different = [np.stack(pair) for pair in ((a, c), (a, d), (b, c), (b, d))]
        spread = np.subtract.outer([_span(pair) for pair in different], [_span(pair) for pair in same])
        i, j = np.unravel_index(np.abs(spread).argmin(), spread.shape)
        return (different[i], same[j]) if abs(spread[i, j]) <= TOLERANCE else None

    def _add_paths(self, paths: list[Points], count: int, dashes: int, random: np.random.Generator) -> list[Points]:
        """Return the paths and up to `count` more; fewer if one does not fit."""
        paths = [*paths]
        for _ in range(count):
            path = self._path(paths, dashes, random)
            if path is None:
                break
            paths.append(path)
        return paths

    def _path(self, others: list[Points], dashes: int, random: np.random.Generator) -> Points | None:
        """Draw a path that keeps clear of all others and of itself; None if it does not fit."""
        before = sum(map(len, others))
        taken = np.empty((before + dashes, 3, 2))
        taken[:before] = _with_middle(np.concatenate(others)) if others else 0.0
        for _ in range(PATHS):
            tip, heading, bend = random.uniform(1, self.size - 1, 2), random.uniform(0, 2 * math.pi), math.pi
            for made in range(dashes):
                headings = heading + random.uniform(-bend, bend, DIRECTIONS)
                ways = np.stack([np.cos(headings), np.sin(headings)], axis=-1)
                starts = tip + ways * GAP if made else np.broadcast_to(tip, ways.shape)
                candidates = _with_middle(np.stack([starts, starts + ways * DASH], axis=1))
                # Only the last dash of the same path may be near: it is a gap away.
                free = self._free(candidates, taken[: before + max(0, made - 1)])
                if not free.any():
                    break
                first = int(free.argmax())
                taken[before + made] = candidates[first]
                tip, heading, bend = candidates[first, 1], headings[first], BEND
            else:
                return taken[before:, :2]
        return None

    def _free(self, candidates: Points, taken: Points) -> NDArray[np.bool_]:
        """Tell which dashes (c, 3, 2) lie in the image and clear of all dashes taken (k, 3, 2)."""
        inside = ((candidates >= 1) & (candidates <= self.size - 1)).all((1, 2))
        x, y = (np.subtract.outer(candidates[..., axis], taken[..., axis].ravel()) for axis in (0, 1))
        return inside & (x * x + y * y >= CLEARANCE**2).all((1, 2))

    def render(self, scene: Scene) -> NDArray[np.uint8]:
        """Compute grey levels (size, size): a pixel is as bright as the nearest ink covers its centre."""
        middle = np.arange(self.size) + 0.5
        pixels = np.stack(np.meshgrid(middle, middle), axis=-1).reshape(-1, 1, 2)
        dashes = np.concatenate(scene.paths)
        start, way = dashes[:, 0], dashes[:, 1] - dashes[:, 0]
        along = (((pixels - start) * way).sum(-1) / DASH**2).clip(0, 1)
        from_dash = np.linalg.norm(pixels - start - along[..., None] * way, axis=-1).min(1)
        from_dot = np.linalg.norm(pixels - scene.dots, axis=-1).min(1)
        ink = (WIDTH / 2 + 0.5 - from_dash).clip(0, 1) * CONTRAST
        dots = (DOT + 0.5 - from_dot).clip(0, 1)
        return (np.maximum(ink, dots) * (LEVELS - 1)).round().astype(np.uint8).reshape(self.size, self.size)


def _with_middle(dashes: Points) -> Points:
    """Append the middle of dashes to their ends: (k, 2, 2) → (k, 3, 2)."""
    return np.concatenate([dashes, dashes.mean(1, keepdims=True)], axis=1)


def _span(pair: Points) -> float:
    return float(np.linalg.norm(pair[0] - pair[1]))
