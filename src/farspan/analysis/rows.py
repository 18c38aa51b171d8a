"""From a checkpoint to rows in results/analysis-LABEL.json."""

import math
import os
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farspan.analysis.census import BORDERS
from farspan.analysis.curves import LARGEST
from farspan.analysis.run import Analysis, Settings, analyze
from farspan.checkpoints import load, open_source, text_tokenizer
from farspan.data import documents
from farspan.data.sources import resolve
from farspan.errors import require
from farspan.evaluation.conditions import device
from farspan.results import check_out, write_result
from farspan.utils import Progress, check_folder, silent

LONGEST = 32_768
"""Tokens read of a text unless more are asked for."""
DIGITS = 6
"""Significant digits in a file; the analysis itself holds all."""


def analyze_checkpoint(
    model: str | os.PathLike[str],
    text: Sequence[str],
    out: Path,
    settings: Settings | None = None,
    *,
    label: str | None = None,
    texts: int = 4,
    text_tokens: int | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> tuple[list[dict[str, Any]], Path]:
    """Analyze a model and write `out`/results/analysis-LABEL.json; return the rows and the file.

    Args:
        model: folder of a farspan or LLaMA-family model, or a GGUF file.
        text: sources of documents; at most `texts` of two windows or more are used, each cut to `text_tokens`.
        label: by default the attention of a farspan model, and the name of any other checkpoint.
        force: replace an earlier result.
    """
    for one in text:
        resolve(one)
    settings, source = settings or Settings(), open_source(Path(model))
    loaded = load(source, dtype=torch.float32, device=device())
    loaded.set_log_length(False)  # the factors of its scores are those of plain ones
    least = 2 * loaded.config.train_length
    if label is None:
        names = {spec.name for spec in loaded.config.attention_specs}
        ours = source.config.get("model_type") == "farspan" and len(names) == 1
        label = names.pop() if ours else re.sub(r"[^\w.-]", "-", Path(model).resolve().stem)
    require(
        re.fullmatch(r"[\w.-]{1,100}", label) is not None,
        f"label must be up to 100 letters, digits, dots or dashes, got {label!r}; it names a file",
    )
    if not (out / "results").is_dir():
        check_folder(out, what="of results")
    path = out / "results" / f"analysis-{label}.json"
    check_out(path, force)
    tokenizer = text_tokenizer(model)
    cut = text_tokens or max(least, min(LONGEST, LARGEST * least // 2))
    encoded = (torch.tensor(tokenizer.encode(document.text)[:cut]) for source in text for document in documents(source))
    tokens = list(islice((ids for ids in encoded if len(ids) >= least), texts))
    made = rows(analyze(loaded, tokens, settings, progress), label)
    write_result(path, made, device=loaded.device.type, seed=settings.seed, kind="analysis")
    return made, path


def plain(value: Any) -> Any:
    """Return numbers as JSON holds them: tensors as lists, rounded, None for what is not a number.

    >>> plain({"a": torch.tensor([[1.23456789, torch.nan]])})
    {'a': [[1.23457, None]]}
    """
    if isinstance(value, Tensor):
        value = value.double().tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value


def rows(found: Analysis, label: str) -> list[dict[str, Any]]:
    """Make the rows: ``kind`` says which of model, census, borders, curve, drift, loss each is."""
    settings = found.settings
    model = {
        "label": label,
        "attention": found.attention,
        "train_length": found.train_length,
        "longest": found.reach,
        "texts": len(found.sizes),
        "tokens": sum(found.sizes),
        "layers": found.layers,
        "heads": found.heads,
        "pairs": found.theta.shape[1],
        "scalings": list(settings.scalings),
        "factor": settings.factor,
        "lengths": found.lengths,
        "theta": found.theta,
        # How many times more tokens the zone of each pair holds: k for linear scaling, λ^(2j/d) for NTK (App. D.2).
        "widening": dict(zip(settings.scalings, found.theta[0] / found.theta, strict=True)),
    }
    made = [{"kind": "model", **model}]
    for (layer, region), census in found.census.items():
        made.append({"kind": "census", "layer": layer, "region": region, **census.row(settings.scalings)})
    made += _border_rows(found)
    made += [{"kind": "curve", "layer": layer, **decay.row()} for layer, decay in found.decay.items()]
    for (method, length, layer), drift in found.drift.items():
        made.append({"kind": "drift", "scaling": method, "length": length, "layer": layer, **drift.row()})
    for (method, length), (nll, tokens) in found.losses.items():
        if method != "control":
            losses = {"loss": nll / tokens, "control": found.losses["control", length][0] / tokens}
            made.append({"kind": "loss", "scaling": method, "length": length, **losses, "tokens": tokens})
    return [plain(row) for row in made]


def _border_rows(found: Analysis) -> list[dict[str, Any]]:
    """Count crossings by scaling, border and frequency, over all layers and heads, inside and past the training length.

    `first_past`: share of pairs of query and key that cross this border for the first time past the training length.
    """
    made, seen = [], [census for (_, region), census in found.census.items() if region == "inside"]
    for k, method in enumerate(found.settings.scalings):
        near, far = ([census.crossings(k, n - 1) for census in seen] for n in (found.train_length, found.reach))
        inside, total = (torch.stack([mean for mean, _ in each]).mean((0, 2)) for each in (near, far))
        ever, ever_far = (torch.stack([once for _, once in each]).mean((0, 2)) for each in (near, far))
        for i, border in enumerate(BORDERS):
            means = {"inside": inside[i], "past": total[i] - inside[i], "ever_inside": ever[i]}
            made.append(
                {"kind": "borders", "scaling": method, "border": border, **means, "first_past": ever_far[i] - ever[i]}
            )
    return made
