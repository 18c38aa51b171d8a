"""Result files → checked rows and, over their seeds, estimates."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import from_json

from farspan.errors import require
from farspan.utils import wilson

Count = Annotated[int, Field(ge=0, le=2**60)]
Length = Annotated[int, Field(ge=1, le=2**40)]
Number = Annotated[float, Field(gt=-math.inf)]  # nan is not
Positive = Annotated[float, Field(gt=0)]
Pair = Annotated[list[Number], Field(min_length=2, max_length=2)]


def _model(fields: str) -> type[BaseModel]:
    """Make a model of named fields, whose types are those of TYPES; "?" marks those that may be absent, or null."""
    made: dict[str, Any] = {}
    for name in fields.split():
        bare = name.removesuffix("?")
        made[bare] = (TYPES[bare], ...) if bare == name else (TYPES[bare] | None, None)
    return create_model(fields, __config__=ConfigDict(strict=True, protected_namespaces=()), **made)


FIELDS: tuple[tuple[Any, str], ...] = (
    (str, "variant scaling task mode model attention kind set field command commit device step message"),
    (str, "model_fingerprint"),
    (Length, "length stride stop train_length"),
    (Count, "seed tokens texts cases correct parameters steps pretraining_steps stages peak_bytes bytes start window"),
    (Count, "distance"),
    (Number, "seconds tokens_per_second final_loss passkey_share retrieval_share mfu depth nll control_nll gain"),
    (Positive, "ppl bits_per_byte"),
    (Pair, "gain_ci95"),
    (list[Pair], "losses"),
    (bool, "right"),
    (dict[str, Any], "versions"),
    (Literal["done", "failed", "pending", "busy"], "state"),
)
TYPES = {name: of for of, names in FIELDS for name in names.split()}
TYPES["outcomes"] = list[_model("distance right")]  # type: ignore[misc]
KINDS = {
    "task": "task length parameters steps pretraining_steps seconds tokens_per_second? peak_bytes? cases? correct? "
    "ppl?",
    "perplexity": "length mode stride tokens texts ppl",
    "passkey": "length cases correct outcomes",
    "retrieval": "task length depth? cases correct",
    "positions": "start stop nll tokens control_nll? gain? gain_ci95?",
    "training": "length parameters tokens steps final_loss seconds passkey_share retrieval_share? losses "
    "tokens_per_second? mfu?",
    "model": "model attention stages tokens train_length seconds? window? passkey_share? retrieval_share?",
    "bits": "length bits_per_byte bytes texts",
    "pairs": "kind set field cases correct",
    "cache": "length bytes",
}
"""The fields of each kind of row beside variant, seed and scaling."""
MODELS = {kind: _model(f"variant seed scaling {fields}") for kind, fields in KINDS.items()}
SOURCE = _model("command commit? device seed versions model_fingerprint?")
STEP = _model("step state message?")
ON_CARDS = ("perplexity", "passkey", "retrieval")
IDENTITY = "model variant seed scaling task kind set field depth start stop mode length"
"""The fields that tell one measurement from another."""

# Files of schema 1 do not state their kind, and some names were others.
OLD_SCALINGS = {"ntk": "dynamic_ntk", "static-ntk": "ntk", "pi": "linear"}
OLD_ANALYSIS = {"pi": "linear", "dynamic": "dynamic_ntk", "law": "scaling", "laws": "scalings"}


class Record(dict[str, Any]):
    """A row, with its fields as attributes; `where` says what it was read from."""

    where: str

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


def find(rows: Iterable[Record], /, **wanted: Any) -> list[Record]:
    """Return the rows whose fields have these values."""
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


# Estimates


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, the smallest and largest seed, and what was counted."""

    value: float
    low: float
    high: float
    seeds: int
    interval: tuple[float, float] | None = None
    """95% Wilson interval of a share, over all cases of all seeds."""
    cases: int = 0
    texts: int = 0
    tokens: int = 0


def mean_of(values: Sequence[float], *, texts: int = 0, tokens: int = 0) -> Estimate | None:
    """Average over seeds."""
    if not values:
        return None
    return Estimate(sum(values) / len(values), min(values), max(values), len(values), texts=texts, tokens=tokens)


def perplexity_of(rows: Sequence[Record]) -> Estimate | None:
    """Average the seeds' perplexities; texts and tokens are those of one seed."""
    texts, tokens = (min((row[name] for row in rows), default=0) for name in ("texts", "tokens"))
    return mean_of([row.ppl for row in rows], texts=texts, tokens=tokens)


def share_of(shares: Iterable[Mapping[str, Any]]) -> Estimate | None:
    """Count the correct cases of all seeds."""
    counted = [(share["correct"], share["cases"]) for share in shares if share["cases"]]
    if not counted:
        return None
    each, (correct, cases) = [right / of for right, of in counted], map(sum, zip(*counted, strict=True))
    return Estimate(correct / cases, min(each), max(each), len(each), wilson(correct, cases), cases=cases)


def scaling_order(scaling: str) -> tuple[bool, int, str]:
    """Return the sort key of a scaling.

    >>> sorted(["ntk-16", "ntk-4/per_request", "ntk-4", "none"], key=scaling_order)
    ['none', 'ntk-4', 'ntk-4/per_request', 'ntk-16']
    """
    digits = "".join(c for c in scaling.partition("/")[0] if c.isdigit())
    return (scaling != "none", int(digits or 0), scaling)


# A run


@dataclass
class Run:
    """All that a run folder holds, or all about one analysed model."""

    records: dict[str, list[Record]] = field(default_factory=dict)
    """Rows by kind."""
    analyses: list["Run"] = field(default_factory=list)
    sources: list[Record] = field(default_factory=list)
    steps: list[Record] = field(default_factory=list)

    def of(self, kind: str, /, **wanted: Any) -> list[Record]:
        """Return the rows of a kind whose fields have these values."""
        return find(self.records.get(kind, []), **wanted)

    @property
    def model(self) -> Record:
        """The analysed model."""
        return self.records["model"][0]

    @property
    def is_study(self) -> bool:
        """Whether this is a drop-in study, perhaps one without a model yet."""
        return bool(self.of("model")) or any(step.step.startswith("convert ") for step in self.steps)

    @property
    def train_length(self) -> int | None:
        """The training length; without training records the shortest length measured."""
        rows = self.of("training")[:1] or [*self.of("perplexity"), *self.of("passkey")]
        return min((row.length for row in rows), default=None)

    def lengths(self, kind: str) -> list[int]:
        """Return the lengths of sliding windows, or of passkey prompts."""
        return sorted({row.length for row in self.of(kind) if row.get("mode", "sliding") == "sliding"})

    def scalings(self, *kinds: str, **wanted: Any) -> list[str]:
        """Return the scalings of the rows of these kinds, "none" first, then by factor."""
        return sorted({row.scaling for kind in kinds for row in self.of(kind, **wanted)}, key=scaling_order)

    def at(self, kind: str, variant: str, scaling: str, length: int) -> Estimate | None:
        """Return the perplexity of sliding windows, or the passkey accuracy."""
        wanted = {"variant": variant, "scaling": scaling, "length": length}
        if kind == "perplexity":
            return perplexity_of(self.of(kind, mode="sliding", **wanted))
        return share_of(self.of(kind, **wanted))

    def control(self, variant: str, scaling: str, length: int) -> Estimate | None:
        """Return the truncation control: the same tokens with the context cut to the training length.

        A single row serves all lengths: sliding windows score the same tokens at each. Inside the training length
        dynamic NTK changes nothing, so the row without scaling serves every scaling.
        """
        for name in (scaling, "none"):
            rows = self.of("perplexity", variant=variant, scaling=name, mode="truncated")
            if len({row.length for row in rows}) > 1:
                rows = find(rows, length=length)
            if rows:
                return perplexity_of(rows)
        return None

    def passkey_between(self, variant: str, scaling: str, low: float, high: float) -> Estimate | None:
        """Return passkey accuracy over the prompts of all lengths whose key is `low` < tokens ≤ `high` from the end."""
        by_seed: dict[int, list[bool]] = {}
        for row in self.of("passkey", variant=variant, scaling=scaling):
            by_seed.setdefault(row.seed, []).extend(x["right"] for x in row.outcomes if low < x["distance"] <= high)
        return share_of({"cases": len(right), "correct": sum(right)} for right in by_seed.values())


# Loading


def collect(folder: Path) -> Run:
    """Read `results/*.json` and `status.json` of a run folder."""
    results, status = folder / "results", folder / "status.json"
    said = f"folder must hold results/*.json, got {folder}; run `farspan reproduce --out {folder}` first"
    require(results.is_dir() or status.is_file(), said)
    steps = _load(status) if status.is_file() else []
    require(isinstance(steps, list), f"{status} must be a list of steps, got {type(steps).__name__}; delete it")
    run = Run(steps=[_record(STEP, step, str(status)) for step in steps])
    for path in sorted(results.glob("*.json")):
        _add(run, path)
    said = f"{results} must hold evaluations, trainings or analyses, got none; run `farspan reproduce` first"
    require(bool(run.sources or run.steps), said)
    lengths = {str(row.length) for row in run.of("training")}
    got = ", ".join(sorted(lengths))
    require(len(lengths) <= 1, f"{results} must hold one training length, got {got}; report them separately")
    return run


def collect_files(paths: Sequence[Path], variant: str) -> Run:
    """Read what `farspan eval` wrote about one model, named `variant` where rows do not name it."""
    run = Run()
    for path in paths:
        require(path.is_file(), f"results must be files of `farspan eval`, got {str(path)!r}, which is none")
        kind = _add(run, path, variant)
        require(
            kind in ON_CARDS, f"{path} must be of a kind that cards show, {', '.join(ON_CARDS)}, got {kind}; omit it"
        )
    variants = sorted({row.variant for rows in run.records.values() for row in rows})
    require(len(variants) <= 1, f"results must be about one model, got rows of {', '.join(variants)}; separate them")
    return run


def _add(run: Run, path: Path, variant: str | None = None) -> str | None:
    """Add a result file to a run. Return its kind, or None for other files."""
    data = _load(path)
    if variant is None and not (isinstance(data, dict) and "schema" in data):
        return None  # settings, for example
    good = isinstance(data, dict) and data.get("schema") in (1, 2) and isinstance(data.get("rows"), list)
    said = f"{path} must be a result file of schema 1 or 2 with rows, got another JSON; write it with `farspan`"
    require(good, said)
    rows, schema = data["rows"], data["schema"]
    source = _record(SOURCE, data, str(path))
    source["file"] = path.name
    source["packages"] = ", ".join(f"{name} {number}" for name, number in sorted(source.versions.items()))
    source["model"] = source.model_fingerprint  # read by checkpoints/export.py
    kind = _old_kind(rows) if schema == 1 else str(data.get("kind"))
    if kind not in (*MODELS, "analysis"):
        return None  # a benchmark, for example
    run.sources.append(source)
    if kind == "analysis":
        names = "|".join(OLD_ANALYSIS)
        rows = json.loads(re.sub(rf'"({names})"', lambda name: f'"{OLD_ANALYSIS[name[1]]}"', json.dumps(rows)))
    made = [_row(kind, schema, row, f"{path} row {i}", source, variant) for i, row in enumerate(rows)]
    if kind == "analysis":
        found = Run()
        for row in made:
            found.records.setdefault(str(row.get("kind")), []).append(row)
        run.analyses.append(found)
        return kind
    kept = run.records.setdefault(kind, [])
    seen = {_identity(row): row for row in kept}
    for row in made:
        name = _identity(row)
        first = seen.setdefault(name, row)
        if first is row:
            kept.append(row)
        said = f"{row.where}: {name} was measured before with another outcome, in {first.where}; report them separately"
        require(first == row, said)
    return kind


def _identity(row: Record) -> str:
    return ", ".join(str(row[name]) for name in IDENTITY.split() if row.get(name) not in (None, ""))


def _row(kind: str, schema: int, row: Any, where: str, source: Record, variant: str | None) -> Record:
    """Check a row. Give it the names of schema 2 and, where it has none, its file's variant and seed."""
    require(isinstance(row, dict), f"{where} must be a JSON object, got {str(row)[:40]!r}; write it with `farspan`")
    made = Record(row)
    if kind in MODELS:
        name, seed = label_of(Path(source.file).stem, source.seed)
        named = {"variant": variant or name, "seed": source.seed if variant else seed, "scaling": "none", **row}
        made = _record(MODELS[kind], {**named, "scaling": scaling_of(str(named["scaling"]), schema)}, where)
    made.where = where
    return made


def _old_kind(rows: Sequence[Any]) -> str | None:
    """Return the kind of a file of schema 1: the first of whose fields one of its rows has all."""
    found = [row for row in rows if isinstance(row, dict)]
    if any(row.get("kind") == "model" and "label" in row for row in found):
        return "analysis"
    for kind, fields in KINDS.items():
        names = {name for name in fields.split() if not name.endswith("?")}
        if any(names <= row.keys() and ("kind" in row) == ("kind" in names) for row in found):
            return kind
    return None


def scaling_of(name: str, schema: int) -> str:
    """Return the name that a scaling has since schema 2; "per_query" is the default mode.

    >>> scaling_of("ntk-4/per_query+log", 1), scaling_of("static-ntk-4", 1), scaling_of("ntk-4", 2)
    ('dynamic_ntk-4+log', 'ntk-4', 'ntk-4')
    """
    method, dash, factor = name.replace("/per_query", "").rpartition("-")
    return (OLD_SCALINGS.get(method, method) if schema == 1 else method) + dash + factor


def label_of(stem: str, seed: int) -> tuple[str, int]:
    """Return the variant and seed of rows that name none, from the name of their file.

    >>> label_of("ppl-hybrid-pope-s1-books", 0), label_of("mine", 0)
    (('hybrid-pope (books)', 1), ('mine', 0))
    """
    name = re.sub(r"^(ppl|passkey|retrieval|positions|bits|pairs)-", "", stem)
    found = re.fullmatch(r"(.+)-s(\d{1,9})(?:-(.+))?", name)
    return (found[1] + (f" ({found[3]})" if found[3] else ""), int(found[2])) if found else (name, seed)


def _record(model: type[BaseModel], row: Any, where: str) -> Record:
    """Check a row. Raise one line for the first field that is missing or wrong."""
    try:
        made = Record(model.model_validate(row).model_dump())
    except ValidationError as failed:
        first = failed.errors(include_url=False)[0]
        name, missing = ".".join(map(str, first["loc"])), first["type"] == "missing"
        words = first["msg"].replace("Input should", "must").replace("valid integer", "whole number")
        got = "must be given" if missing else f"{words}, got {first['input']!r:.60}"
        raise ValueError(f"{where}: {name} {got}; write it with `farspan`") from None
    cases, correct = made.get("cases") or 0, made.get("correct") or 0
    require(correct <= cases, f"{where}: correct must lie in 0 … cases, got {correct} of {cases}; recount")
    return made


def _load(path: Path) -> Any:
    try:
        return from_json(path.read_bytes())
    except ValueError as error:  # also what is not UTF-8, or nested too deeply
        raise ValueError(f"{path} must be a JSON file, got {error}; make it again, or leave it out") from error
