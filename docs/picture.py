"""Draw README's picture from recorded results: perplexity and passkeys against length.

python docs/picture.py --results results/hybrid-33m-h200 --out docs/figures/lengths.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter

MODELS = {"rope": ("RoPE", "#d1495b"), "hybrid-rope": ("hybrid-rope", "#66a182"), "hybrid-pope": ("hybrid", "#00798c")}
TRAIN_LENGTH = 512


def rows(folder: Path, pattern: str) -> list[dict[str, Any]]:
    return [row for path in sorted(folder.glob(pattern)) for row in json.loads(path.read_text())["rows"]]


def draw(folder: Path, out: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for model, (label, colour) in MODELS.items():
        perplexity = rows(folder, f"ppl-{model}-s*-books.json")
        sliding = sorted((row["length"], row["ppl"]) for row in perplexity if row["mode"] == "sliding")
        left.plot(*zip(*sliding, strict=True), marker="o", color=colour, label=label)
        truncated = next(row["ppl"] for row in perplexity if row["mode"] == "truncated")
        left.axhline(truncated, color=colour, linestyle=":", linewidth=1)
        passkeys = sorted((row["length"], row["accuracy"]) for row in rows(folder, f"passkey-{model}-s*.json"))
        right.plot(*zip(*passkeys, strict=True), marker="o", color=colour, label=label)
    left.set(ylabel="perplexity of held-out books", yscale="log", yticks=[50, 100, 200, 300])
    left.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.0f}"))
    left.yaxis.set_minor_formatter("")
    right.set(ylabel="share of 20 passkeys found", ylim=(-0.04, 1.04))
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:.0f}k" if x >= 1024 else f"{x:.0f}"))
        axes.set_xlabel("length in tokens")
        axes.axvline(TRAIN_LENGTH, color="grey", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(title="trained at 512 tokens", frameon=False)
    figure.savefig(out, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path("results/hybrid-33m-h200"))
    parser.add_argument("--out", type=Path, default=Path("docs/figures/lengths.png"))
    arguments = parser.parse_args()
    draw(arguments.results, arguments.out)
