"""Pathfinder as the Long Range Arena has it: are the two dots ends of one dashed path? 32 × 32 grey pixels.

An image has two long paths of 14 dashes, five short ones of 4 as distractors, and two dots, each on an end of a long
path: both on the same path (label 1), or one on each (label 0). Numbers are those published for 32 × 32 pixels at
the hardest level: dashes of length 2 and width 0.5 with gaps of 1, dots of radius 1.5. How much paths bend and how far
they keep from each other is our own choice.

Little but the paths tells the label. A scene is fixed before it: of the ends of its two paths, one pair that belongs
together and one that does not are chosen that lie equally far apart. The label, a fair coin, then says which pair gets
the dots. The places of the two dots still say a little: logistic regression on them was right in 53.1 ± 0.8% (area
under the curve 0.536), since the pairs are matched in distance but not in how near the border they lie. An accuracy of
a few points above one half is therefore no sign that paths are followed.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from farspan.errors import require

LEVELS = 256
"""Grey levels; a pixel's level is its token."""
LABELS = 2
TURNS = 12
"""Directions tried before a path is given up."""
SCENES = 300
"""Scenes begun before an image is said to have no room for its paths."""
Points = NDArray[np.float64]


class Scene(NamedTuple):
    """The dashes of each path (k, 2 ends, x and y), the two long paths first; the two dots (2, 2); the label."""

    paths: list[Points]
    dots: Points
    label: int


@dataclass(frozen=True)
class Pathfinder:
    """The distribution of images; the defaults are the published ones.

    >>> pixels, label = Pathfinder().draw(seed=0, index=5)
    >>> pixels.shape, int(pixels.max()), label in (0, 1)
    ((32, 32), 255, True)
    """

    size: int = 32
    dashes: int = 14
    distractors: int = 5
    distractor_dashes: int = 4
    dash: float = 2.0
    gap: float = 1.0
    width: float = 0.5
    dot_radius: float = 1.5
    contrast: float = 0.75
    """Brightness of a dash beside that of a dot."""
    bend: float = math.pi / 3
    """The largest turn from one dash to the next."""
    clearance: float = 2.5
    """Dashes that are not neighbours on a path are at least so far apart: further than a gap."""
    tolerance: float = 1.0
    """How much the two candidate pairs of ends may differ in distance."""

    def __post_init__(self) -> None:
        require(
            self.dashes >= 2 and self.distractor_dashes >= 1 and self.distractors >= 0,
            f"dashes must be at least 2, got {self.dashes}; try 14",
        )
        reach = self.dash + self.gap
        require(
            self.clearance > self.gap and self.size >= 2 * reach,
            f"clearance must exceed gap = {self.gap} and size two dashes, got {self.clearance} and {self.size}; "
            "a path could not be told from its neighbours",
        )

    def draw(self, seed: int, index: int) -> tuple[NDArray[np.uint8], int]:
        """Image `index` of the set `seed`: grey levels (size, size) and its label, the same for ever."""
        scene = self.scene(seed, index)
        return self.render(scene), scene.label

    def scene(self, seed: int, index: int) -> Scene:
        """The geometry of image `index`."""
        random = np.random.Generator(np.random.Philox(key=np.array([seed, 0], np.uint64), counter=[0, 0, 0, index]))
        for _ in range(SCENES):
            paths: list[Points] = []
            for _ in range(2):
                path = self._path(paths, self.dashes, random)
                if path is None:
                    break
                paths.append(path)
            pairs = self._pairs(paths) if len(paths) == 2 else None
            if pairs is None:
                continue
            for _ in range(self.distractors):
                path = self._path(paths, self.distractor_dashes, random)
                if path is None:
                    break
                paths.append(path)
            if len(paths) == 2 + self.distractors:
                label = int(random.integers(2))
                return Scene(paths, pairs[label], label)
        raise ValueError(
            f"size must leave room for two paths of {self.dashes} dashes and {self.distractors} distractors, got "
            f"{self.size}, where {SCENES} tries found no such image; enlarge it or take fewer dashes"
        )

    def _pairs(self, paths: list[Points]) -> tuple[Points, Points] | None:
        """Two ends on different paths and two on the same, as far apart from each other; None where there are none."""
        (a, b), (c, d) = ((path[0, 0], path[-1, 1]) for path in paths)
        same = [np.stack(pair) for pair in ((a, b), (c, d))]
        different = [np.stack(pair) for pair in ((a, c), (a, d), (b, c), (b, d))]
        spread = np.subtract.outer([_span(pair) for pair in different], [_span(pair) for pair in same])
        i, j = np.unravel_index(np.abs(spread).argmin(), spread.shape)
        return (different[i], same[j]) if abs(spread[i, j]) <= self.tolerance else None

    def _path(self, others: list[Points], dashes: int, random: np.random.Generator, tries: int = 20) -> Points | None:
        """A path of so many dashes that keeps clear of all others and of itself; None where it does not fit."""
        before = sum(map(len, others))
        taken = np.empty((before + dashes, 3, 2))
        taken[:before] = _along(np.concatenate(others)) if others else 0.0
        for _ in range(tries):
            tip, heading, bend = random.uniform(1, self.size - 1, 2), random.uniform(0, 2 * math.pi), math.pi
            for made in range(dashes):
                headings = heading + random.uniform(-bend, bend, TURNS)
                ways = np.stack([np.cos(headings), np.sin(headings)], axis=-1)
                starts = tip + ways * self.gap if made else np.broadcast_to(tip, ways.shape)
                candidates = _along(np.stack([starts, starts + ways * self.dash], axis=1))
                # The last dash of one's own path is a gap away, hence the only one that may be near.
                free = self._free(candidates, taken[: before + max(0, made - 1)])
                if not free.any():
                    break
                first = int(free.argmax())
                taken[before + made] = candidates[first]
                tip, heading, bend = candidates[first, 1], headings[first], self.bend
            else:
                return taken[before:, :2]
        return None

    def _free(self, candidates: Points, taken: Points) -> NDArray[np.bool_]:
        """Which dashes (c, 3, 2) lie in the image and clear of all dashes taken (k, 3, 2)."""
        inside = ((candidates >= 1) & (candidates <= self.size - 1)).all((1, 2))
        x, y = (np.subtract.outer(candidates[..., axis], taken[..., axis].ravel()) for axis in (0, 1))
        return inside & (x * x + y * y >= self.clearance**2).all((1, 2))

    def render(self, scene: Scene) -> NDArray[np.uint8]:
        """Grey levels (size, size): a pixel is as bright as the nearest ink covers its centre."""
        middle = np.arange(self.size) + 0.5
        pixels = np.stack(np.meshgrid(middle, middle), axis=-1).reshape(-1, 1, 2)
        dashes = np.concatenate(scene.paths)
        start, way = dashes[:, 0], dashes[:, 1] - dashes[:, 0]
        along = (((pixels - start) * way).sum(-1) / self.dash**2).clip(0, 1)
        from_dash = np.linalg.norm(pixels - start - along[..., None] * way, axis=-1).min(1)
        from_dot = np.linalg.norm(pixels - scene.dots, axis=-1).min(1)
        ink = (self.width / 2 + 0.5 - from_dash).clip(0, 1) * self.contrast
        dots = (self.dot_radius + 0.5 - from_dot).clip(0, 1)
        return (np.maximum(ink, dots) * (LEVELS - 1)).round().astype(np.uint8).reshape(self.size, self.size)


def _along(dashes: Points) -> Points:
    """Both ends and the middle of dashes: (k, 2, 2) → (k, 3, 2)."""
    return np.concatenate([dashes, dashes.mean(1, keepdims=True)], axis=1)


def _span(pair: Points) -> float:
    return float(np.linalg.norm(pair[0] - pair[1]))
