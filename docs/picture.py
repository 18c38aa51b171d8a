"""Draw README's picture from recorded results: perplexity and passkeys against length.

python docs/picture.py --results results/hybrid-h200 --out docs/figures/lengths.png
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter

MODELS = {
    "rope": ("RoPE", "none", "#d1495b"),
    "rope+ntk": ("RoPE, dynamic NTK", "dynamic_ntk-4", "#edae49"),
    "hybrid-rope": ("hybrid-rope", "none+log", "#66a182"),
    "hybrid-pope": ("hybrid-pope", "none+log", "#00798c"),
}
"""Label, scaling and colour."""
TRAIN_LENGTH = 512


def rows(folder: Path, kind: str, model: str) -> list[dict[str, Any]]:
    scaling = MODELS[model][1]
    paths = folder.glob(f"{kind}-{model.removesuffix('+ntk')}-s*-{scaling}*.json")
    return [row for path in sorted(paths) for row in json.loads(path.read_text())["rows"]]


def mean(found: list[dict[str, Any]], value: str) -> list[tuple[int, float]]:
    """Return the mean over seeds by length."""
    lengths = sorted({row["length"] for row in found})
    return [(n, statistics.mean(row[value] for row in found if row["length"] == n)) for n in lengths]


def draw(folder: Path, out: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for model, (label, _, colour) in MODELS.items():
        perplexity = rows(folder, "ppl", model)
        sliding = mean([row for row in perplexity if row["mode"] == "sliding"], "ppl")
        left.plot(*zip(*sliding, strict=True), marker="o", color=colour, label=label)
        for _, truncated in mean([row for row in perplexity if row["mode"] == "truncated"], "ppl"):
            left.axhline(truncated, color=colour, linestyle=":", linewidth=1)
        right.plot(
            *zip(*mean(rows(folder, "passkey", model), "accuracy"), strict=True), marker="o", color=colour, label=label
        )
    left.set(ylabel="perplexity of held-out books", yscale="log", yticks=[50, 100, 200, 400])
    left.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.0f}"))
    left.yaxis.set_minor_formatter("")
    right.set(ylabel="share of passkeys found", ylim=(-0.04, 1.04))
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:.0f}k" if x >= 1024 else f"{x:.0f}"))
        axes.set_xlabel("length in tokens")
        axes.axvline(TRAIN_LENGTH, color="grey", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    right.legend(title="trained at 512 tokens", frameon=False, loc="center right", bbox_to_anchor=(1, 0.36))
    figure.savefig(out, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path("results/hybrid-h200"))
    parser.add_argument("--out", type=Path, default=Path("docs/figures/lengths.png"))
    arguments = parser.parse_args()
    draw(arguments.results, arguments.out)
