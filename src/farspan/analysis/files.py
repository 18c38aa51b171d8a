"""From a path and texts to files: results/analysis-LABEL.json, the whole census as .npz, figures and the page."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farspan.analysis.ablate import head_worth
from farspan.analysis.drift import LARGEST
from farspan.analysis.laws import under
from farspan.analysis.load import is_ours, load_model, load_texts
from farspan.analysis.relate import CAUSES, EFFECTS, study_rows
from farspan.analysis.rows import arrays, rows
from farspan.analysis.run import Analysis, Settings, analyze, chosen_layers
from farspan.analysis.window import effective_window
from farspan.convert.text import text_tokenizer
from farspan.data import TextTokenizer, load_tokenizer
from farspan.data.passkey import make_case
from farspan.errors import require
from farspan.evaluation import passkey
from farspan.files import check_writable
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.report.looks import relation
from farspan.results import write_result

LONGEST = 32_768
"""Tokens of a text unless more are asked for."""
Show = Callable[[str, int, int, str], None]
"""(stage, done, total, what)."""


@dataclass(frozen=True)
class Request:
    """What to look at, and where to write."""

    model: str
    text: tuple[str, ...]
    out: Path
    label: str | None = None
    tokenizer: str | None = None
    texts: int = 4
    text_tokens: int | None = None
    passkey: int = 0
    ablate: bool = False


@dataclass(frozen=True)
class Written:
    """What was found, in rows and in words, and the files that hold it."""

    rows: list[dict[str, Any]]
    said: list[str]
    files: list[Path]


def look(request: Request, settings: Settings, show: Show) -> Written:
    """Analyse a model and write everything; what cannot be meant is refused before the long work begins."""
    model = load_model(request.model)
    layers = chosen_layers(model, settings.layers)
    label = request.label or default_label(request.model, model)
    require(
        re.fullmatch(r"[\w.-]+", label) is not None,
        f"label must be letters, digits, dots or dashes, got {label!r}; it names a file",
    )
    _check_label(request, label)
    check_writable(Path(request.out) / "results" / f"analysis-{label}.json")
    tokenizer = text_tokenizer(request.model) if request.tokenizer is None else load_tokenizer(request.tokenizer)
    train_length = model.config.train_length
    cut = request.text_tokens or max(2 * train_length, min(LONGEST, LARGEST * train_length))
    if request.passkey:
        make_case(tokenizer, train_length, 10_000, 0.5)  # refuses a window too short for the prompt
    texts = load_texts(list(request.text), tokenizer, train_length=train_length, text_tokens=cut, texts=request.texts)
    found = analyze(model, texts, settings, lambda done, total, what: show("layers", done, total, what))
    worth = None
    if request.ablate:
        worth = _mean_worth(model, texts, layers, [found.lengths[0], found.lengths[-1]], show)
    made = rows(found, label) + study_rows(found, worth)
    if request.passkey:
        made += window_rows(model, tokenizer, found, request.passkey, show)
    files = write(request.out, label, made, found, model.device.type)
    return Written(made, spoken(made), [*files, *page(request.out)])


def _mean_worth(
    model: FarspanForCausalLM, texts: list[Tensor], layers: list[int], lengths: list[int], show: Show
) -> Tensor:
    """What each head is worth, averaged over the texts that reach the longest length: (layers, h, lengths)."""
    long = [text for text in texts if text.shape[0] >= lengths[-1]]

    def tell(number: int, done: int, total: int, what: str) -> None:
        show("heads", number * total + done, len(long) * total, f"text {number + 1}, {what}")

    found = [head_worth(model, text, layers, lengths, partial(tell, i)) for i, text in enumerate(long)]
    return torch.stack(found).mean(0)


def _check_label(request: Request, label: str) -> None:
    """Two models of one attention have one default label: the second must not overwrite the first."""
    held = request.out / "results" / f"analysis-{label}.json"
    if request.label is None and held.is_file():
        require(
            request.model in json.loads(held.read_text(encoding="utf-8"))["command"].split(),
            f"out {str(request.out)!r} already holds another model called {label!r}; choose a label",
        )


def default_label(path: str, model: FarspanForCausalLM) -> str:
    """The attention of a farspan model, by which the report knows it; the name of any other checkpoint."""
    names = {spec.name for spec in model.config.attention_specs}
    if is_ours(Path(path)) and len(names) == 1:
        return names.pop()
    return re.sub(r"[^\w.-]", "-", Path(path).resolve().stem)


def window_rows(
    model: FarspanForCausalLM, tokenizer: TextTokenizer, found: Analysis, cases: int, show: Show
) -> list[dict[str, Any]]:
    """The effective window under each law, from passkeys at every length (App. B.1)."""
    made, done, total = [], 0, len(found.settings.laws) * len(found.lengths)
    for law in found.settings.laws:
        outcomes: list[tuple[int, bool]] = []
        with under(model, law, found.settings.factor):
            for length in found.lengths:
                row = passkey(model, tokenizer, length=length, cases=cases, seed=found.settings.seed)
                outcomes += [(case["distance"], case["right"]) for case in row["outcomes"]]
                done += 1
                show("passkeys", done, total, f"passkey, {law}, {length} tokens")
        window = effective_window(outcomes, [found.lengths[0] // 2, *found.lengths])
        made.append({"kind": "window", "law": law, **asdict(window)})
    return made


def write(out: Path, label: str, made: list[dict[str, Any]], found: Analysis, device: str) -> list[Path]:
    """The rows with their provenance, and every number of the census."""
    import numpy as np

    base = out / "results" / f"analysis-{label}"
    write_result(f"{base}.json", made, device=device, seed=found.settings.seed)
    numbers: dict[str, Any] = {name: values.cpu().numpy() for name, values in arrays(found).items()}
    np.savez_compressed(f"{base}.npz", **numbers)
    return [Path(f"{base}.json"), Path(f"{base}.npz")]


def page(out: Path) -> list[Path]:
    """The report of the folder, with figures; nothing where matplotlib or jinja2 is not installed."""
    try:
        from farspan.report import write_report

        return [write_report(out)]
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("farspan"):
            raise
        return []


def spoken(made: list[dict[str, Any]]) -> list[str]:
    """What the study found, in words: a null result as such."""
    said = []
    for row in made:
        if row["kind"] == "study" and row["primary"]:
            what = f"{CAUSES[row['cause']]} and {EFFECTS[row['effect']]}, {row['n']} heads"
            said.append(": ".join((what, *relation(row))))
    return said
