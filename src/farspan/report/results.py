"""Result files → checked records and, over their seeds, estimates."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farspan.errors import require, require_choice
from farspan.utils import wilson

IDENTITY = "variant:text seed:count scaling:text "
FIELDS = {
    "perplexity": IDENTITY + "length:length mode:text stride:length tokens:count texts:count ppl:positive",
    "passkey": IDENTITY + "length:length cases:count correct:count near:share far:share outcomes:outcomes",
    "retrieval": IDENTITY + "task:text length:length depth:number? cases:count correct:count",
    "positions": IDENTITY
    + "start:count stop:length nll:number tokens:length control_nll:number? gain:number? gain_ci95:pair?",
    "training": IDENTITY + "length:length parameters:count tokens:count steps:count final_loss:number seconds:number "
    "tokens_per_second:number? passkey_share:number mfu:number? losses:losses",
    "task": IDENTITY + "task:text length:length parameters:count steps:count pretraining_steps:count seconds:number "
    "tokens_per_second:number? peak_bytes:count? cases:count? correct:count? ppl:positive? losses:losses",
    "model": IDENTITY
    + "model:text attention:text stages:count tokens:count seconds:number? train_length:length window:count?",
    "bits": IDENTITY + "length:length bits_per_byte:positive bytes:count texts:count",
    "pairs": IDENTITY + "kind:text set:text field:text cases:count correct:count",
    "cache": IDENTITY + "length:length bytes:count",
    "source": "command:text commit:text? device:text seed:count versions:versions model_fingerprint:text?",
    "step": "step:text state:text message:text?",
    "analysis model": "label:text attention:text train_length:length longest:length texts:count "
    "tokens:count layers heads pairs laws lengths theta",
    "analysis census": "layer region histogram past_pi past_pi_pair zone damped damped_pair",
    "analysis borders": "law border inside past ever_inside first_past",
    "analysis curve": "layer distance samples mean quantiles bound_eq19 bound_eq20 broken",
    "analysis slack": "layer absolute_share rising_share mean_angle moved_share",
    "analysis drift": "law length:length layer even first far logit_top logit_spread hidden_norm",
    "analysis loss": "law length:length loss:number control:number tokens",
    "analysis window": "law at_least:count at_most:count? cases",
    "analysis study": "cause effect primary rho ci95:pair n null x y",
}
"""The fields of each kind of row and what they hold; "?" marks those that may be absent, or null."""
KEYS = {
    "perplexity": ("length", "mode"),
    "passkey": ("length",),
    "retrieval": ("task", "length", "depth"),
    "positions": ("start", "stop"),
    "task": ("task",),
    "bits": ("length",),
    "pairs": ("kind", "set", "field"),
    "cache": ("length",),
}
"""Fields that tell a row from the others of its variant, seed and scaling."""
EVALUATIONS = ("perplexity", "passkey", "retrieval", "positions", "bits", "pairs")
RECORDS = (*EVALUATIONS, "training", "task", "model", "cache")
BENCHES = ("bench-cosformer", "bench-layer", "bench-decode", "bench-kernels")
SHORT = {"ppl": "perplexity", "train": "training"}
"""Other names of kinds."""
OLD: tuple[tuple[str, str | None, set[str]], ...] = (
    ("task", None, {"task", "pretraining_steps"}),
    ("perplexity", None, {"ppl"}),
    ("retrieval", None, {"task", "depth"}),
    ("positions", None, {"start", "stop"}),
    ("training", None, {"losses", "final_loss"}),
    ("model", None, {"model", "attention"}),
    ("bits", None, {"bits_per_byte"}),
    ("analysis", "model", {"label"}),
    ("bench-layer", "layer", {"passes", "b"}),
    ("bench-cosformer", "linear", {"n"}),
    ("bench-cosformer", "softmax", {"length"}),
    ("bench-decode", "best", {"each"}),
    ("bench-decode", "prefill", {"speed_over_rope", "attention"}),
    ("bench-decode", "decode", {"speed_over_rope", "attention"}),
    ("bench-kernels", "decode", {"m", "best_peer"}),
    ("bench-kernels", "prefill", {"m", "best_peer"}),
    ("pairs", "all", {"cases"}),
    ("pairs", "field", {"cases"}),
    ("cache", None, {"length", "bytes"}),
    ("passkey", None, {"correct"}),
)
"""Files of schema 1 have no kind: the first whose `kind` and fields one of their rows has."""
OLD_SCALINGS = {"ntk": "dynamic_ntk", "static-ntk": "ntk", "pi": "linear"}
OLD_METHODS = {"pi": "linear", "dynamic": "dynamic_ntk"}
"""The same in rows of `farspan analyze`."""


class Record(dict[str, Any]):
    """A checked row, with its fields as attributes and its `type`."""

    type: str

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error

    @property
    def key(self) -> tuple[Any, ...]:
        """What was measured."""
        return (self.type, self.variant, self.seed, self.scaling, *(self[name] for name in KEYS.get(self.type, ())))


def find(rows: Iterable[Record], /, **wanted: Any) -> list[Record]:
    """Return the rows whose fields have these values."""
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


@dataclass(frozen=True)
class Analysis:
    """The rows of one analysed model, by kind."""

    rows: Mapping[str, list[Record]]

    @property
    def model(self) -> Record:
        return self.rows["model"][0]

    @property
    def label(self) -> str:
        return str(self.model.label)

    def of(self, kind: str, /, **wanted: Any) -> list[Record]:
        """Return the rows of a kind whose fields have these values."""
        return find(self.rows[kind], **wanted)

    def mean(self, kind: str, read: Callable[[Record], float], **wanted: Any) -> float:
        """Average a number over the rows of a kind, which are layers."""
        values = [read(row) for row in self.of(kind, **wanted)]
        return sum(values) / len(values)


@dataclass
class Run:
    """All that a run folder holds."""

    records: dict[str, list[Record]] = field(default_factory=dict)
    benches: dict[str, list[tuple[str, Record, Any]]] = field(default_factory=dict)
    """Rows with their names and sources."""
    analyses: list[Analysis] = field(default_factory=list)
    sources: list[Record] = field(default_factory=list)
    steps: list[Record] = field(default_factory=list)

    def of(self, kind: str, /, **wanted: Any) -> list[Record]:
        """Return the rows of a kind whose fields have these values."""
        return find(self.records.get(kind, []), **wanted)

    @property
    def is_study(self) -> bool:
        """Whether this is a drop-in study, perhaps one without a model yet."""
        return bool(self.of("model")) or any(step.step.startswith("convert ") for step in self.steps)

    @property
    def train_length(self) -> int | None:
        """The training length; without training records the shortest length measured."""
        if training := self.of("training"):
            return int(training[0].length)
        return min((row.length for row in [*self.of("perplexity"), *self.of("passkey")]), default=None)


# Loading


def collect(folder: Path) -> Run:
    """Read `results/*.json` and `status.json` of a run folder."""
    results, status = folder / "results", folder / "status.json"
    require(
        results.is_dir() or status.is_file(),
        f"folder must hold results/*.json, got {folder}; run `farspan reproduce --out {folder}` first",
    )
    steps = _load(status) if status.is_file() else []
    require(isinstance(steps, list), f"{status} must be a list of steps, got {type(steps).__name__}; delete it")
    _check(steps, str(status))
    run = Run(steps=[record("step", step, str(status)) for step in steps])
    for step in run.steps:
        require_choice("state", step.state, ("done", "failed", "pending", "busy"))
    for path in sorted(results.glob("*.json")):
        _add(run, path)
    require(
        bool(run.sources or run.steps), f"{results} must hold result files, got none; run `farspan reproduce` first"
    )
    timed = [source for kind in BENCHES[1:] for _, source, _ in run.benches.get(kind, [])]
    for what, values in (
        ("one training length", {str(row.length) for row in run.of("training")}),
        ("one result of bench-cosformer", {source.file for _, source, _ in run.benches.get("bench-cosformer", [])}),
        ("CoCA's speed on one device", {source.device for source in timed}),
    ):
        require(
            len(values) <= 1, f"{results} must hold {what}, got {', '.join(sorted(values))}; report them separately"
        )
    run.analyses.sort(key=lambda found: (found.model.attention != "rope", found.label))  # the baseline first
    return run


def collect_files(paths: Sequence[Path], variant: str) -> Run:
    """Read what `farspan eval` wrote about one model, named `variant` where rows do not name it."""
    run = Run()
    for path in paths:
        require(path.is_file(), f"results must be files of `farspan eval`, got {str(path)!r}, which is none")
        require(
            _add(run, path, variant) in EVALUATIONS,
            f"{path} must hold rows of an evaluation; give files of `farspan eval`",
        )
    variants = sorted({row.variant for rows in run.records.values() for row in rows})
    require(len(variants) <= 1, f"results must be about one model, got rows of {', '.join(variants)}; separate them")
    return run


def _add(run: Run, path: Path, variant: str | None = None) -> str | None:
    """Add a result file to a run. Return its kind, or None for other files."""
    data = _load(path)
    if variant is None and not (isinstance(data, dict) and "schema" in data):
        return None  # settings, for example
    require(
        isinstance(data, dict) and data.get("schema") in (1, 2) and isinstance(data.get("rows"), list),
        f"{path} must be a result file of schema 1 or 2 with rows, got another JSON; write it with `farspan`",
    )
    rows, schema = data["rows"], data["schema"]
    kind = _old_kind(rows) if schema == 1 else str(data.get("kind"))
    kind = SHORT.get(kind or "", kind)
    if kind not in (*RECORDS, *BENCHES, "analysis"):
        return None
    _check({name: value for name, value in data.items() if name != "rows"}, str(path))
    source = record("source", data, str(path))
    source |= {
        "file": path.name,
        "model": source.model_fingerprint,
    }  # "model": alias until merged, for export/folder.py
    run.sources.append(source)
    known = {row.key: row for row in run.records.setdefault(kind, [])} if kind in RECORDS else {}
    by_kind: dict[str, list[Record]] = {
        name.removeprefix("analysis "): [] for name in FIELDS if name[:9] == "analysis "
    }
    for i, row in enumerate(rows):
        where = f"{path} row {i}"
        require(isinstance(row, dict), f"{where} must be a JSON object, got {str(row)[:40]!r}; write it with `farspan`")
        _check(row, where)
        if kind in BENCHES:
            run.benches.setdefault(kind, []).append((f"{path.name} row {i}", source, row))
        elif kind == "analysis":
            require(
                row.get("kind") in by_kind,
                f"{where}: kind must be one of {', '.join(by_kind)}, got {row.get('kind')!r}",
            )
            by_kind[row["kind"]].append(record(f"analysis {row['kind']}", _translate(row), where))
        else:
            name, seed = label_of(path.stem, source.seed)
            named = {"variant": variant or name, "seed": source.seed if variant else seed, "scaling": "none", **row}
            found = record(kind, {**named, "scaling": scaling_of(str(named["scaling"]), schema)}, where)
            if known.setdefault(found.key, found) is found:
                run.records[kind].append(found)
            else:
                name = ", ".join(str(part) for part in found.key if part != "")
                same = variant is not None and known[found.key] == found
                require(same, f"{where}: {name} was measured before with another outcome; remove one of the two")
    if kind == "analysis":
        for name in ("model", "census", "curve", "drift", "loss"):
            require(
                bool(by_kind[name]), f"{path} must have a {name} row, got none; write it again with `farspan analyze`"
            )
        run.analyses.append(Analysis(by_kind))
    return kind


def _old_kind(rows: Sequence[Any]) -> str | None:
    found = [row for row in rows if isinstance(row, dict)]
    return next(
        (k for k, of, names in OLD if any(row.get("kind") == of and names <= row.keys() for row in found)), None
    )


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


def _translate(value: Any) -> Any:
    """Rename scaling methods, wherever an analysis names them."""
    if isinstance(value, dict):
        return {OLD_METHODS.get(key, key): _translate(item) for key, item in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], str):
        return [OLD_METHODS.get(item, item) for item in value]
    return OLD_METHODS.get(value, value) if isinstance(value, str) else value


def _check(value: Any, where: str, name: str = "") -> None:
    """Raise for numbers and texts that cannot be shown: nan, beyond 64 bits, half a surrogate pair."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _check(item, where, str(key))
    elif isinstance(value, str):
        good = not any("\ud800" <= c <= "\udfff" for c in value)
        require(good, f"{where}: {name} must be valid text, got {value!a}; write the row with `farspan`")
    elif isinstance(value, int | float):
        top = 2**40 if name in ("length", "context", "n", "m") else 2**63 if isinstance(value, int) else math.inf
        limit = "" if top == math.inf else f" up to {top:.2g}"
        require(
            abs(value) <= top, f"{where}: {name} must be a number{limit}, got {value}; write the row with `farspan`"
        )


def _is_whole(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: Any, low: float = -math.inf) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > low


def _is_share(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and _is_whole(value.get("cases"), 0, 2**40)
        and _is_whole(value.get("correct"), 0, value["cases"])
    )


CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "": (lambda value: True, ""),
    "text": (lambda value: isinstance(value, str), "a text"),
    "count": (lambda value: _is_whole(value, 0, 2**60), "a whole number of at least 0"),
    "length": (lambda value: _is_whole(value, 1, 2**40), "a whole number from 1 to 2^40"),
    "number": (_is_number, "a number"),
    "positive": (lambda value: _is_number(value, 0), "a number above 0"),
    "pair": (lambda value: isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)), "two numbers"),
    "share": (_is_share, "cases and correct ≤ cases"),
    "versions": (lambda value: isinstance(value, dict), "an object"),
    "outcomes": (
        lambda value: isinstance(value, list)
        and all(isinstance(x, dict) and _is_whole(x.get("distance"), 0, 2**40) and "right" in x for x in value),
        "a list of distance and right",
    ),
    "losses": (
        lambda value: isinstance(value, list)
        and all(isinstance(x, list) and len(x) == 2 and all(map(_is_number, x)) for x in value),
        "a list of [step, loss]",
    ),
}  # fmt: skip


def record(kind: str, row: Any, where: str) -> Record:
    """Check a row. Raise one line for the first field that is missing or wrong."""
    require(isinstance(row, dict), f"{where} must be a JSON object, got {str(row)[:40]!r}; write it with `farspan`")
    made = Record()
    made.type = kind
    for name, _, wanted in (text.partition(":") for text in FIELDS[kind].split()):
        optional, (good, words) = wanted.endswith("?"), CHECKS[wanted.removesuffix("?")]
        value = row.get(name)
        require(optional or name in row, f"{where}: {name} must be given; write the row with `farspan`")
        said = f"{where}: {name} must be {words}, got {str(value)[:60]!r}; write the row with `farspan`"
        require((optional and value is None) or good(value), said)
        made[name] = value
    if "correct" in made and not (made.get("ppl") and made.correct is None):
        require(_is_share(made), f"{where}: correct must lie in 0 … cases, got {made.correct} of {made.cases}; recount")
    return made


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also what is not UTF-8
        raise ValueError(f"{path} must be a JSON file, got {error}; make it again, or leave it out") from error


def theorems(attention: str) -> tuple[str, ...]:
    """Return the bounds that hold on every score: Eq. 20 needs initial angles of zero."""
    return ("eq19", "eq20", "eq21") if attention in ("coca-exact", "coca-strict") else ("eq19", "eq21")


def relation(row: Mapping[str, Any]) -> tuple[str, str]:
    """Describe the correlation that an analysis found.

    >>> relation({"rho": 0.314, "ci95": [-0.1, 0.6], "null": True})
    ('ρ = 0.31 (95% -0.10 to 0.60)', 'no relation told from chance')
    """
    low, high = row["ci95"]
    found = "no relation told from chance" if row["null"] else "a relation beyond chance"
    return f"ρ = {row['rho']:.2f} (95% {low:.2f} to {high:.2f})", found


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


def perplexity_at(run: Run, variant: str, scaling: str, length: int) -> Estimate | None:
    """Return the sliding-window perplexity."""
    return perplexity_of(run.of("perplexity", variant=variant, scaling=scaling, length=length, mode="sliding"))


def control_at(run: Run, variant: str, scaling: str, length: int) -> Estimate | None:
    """Return the truncation control: the same tokens with the context cut to the training length.

    A single row serves all lengths: sliding windows score the same tokens at each. Inside the training length dynamic
    NTK changes nothing, so the row without scaling serves every scaling.
    """
    for name in (scaling, "none"):
        rows = run.of("perplexity", variant=variant, scaling=name, mode="truncated")
        if len({row.length for row in rows}) > 1:
            rows = find(rows, length=length)
        if rows:
            return perplexity_of(rows)
    return None


def passkey_at(run: Run, variant: str, scaling: str, length: int, part: str = "all") -> Estimate | None:
    """Return passkey accuracy; "near" or "far": keys within or beyond the training length of the end."""
    rows = run.of("passkey", variant=variant, scaling=scaling, length=length)
    return share_of(row if part == "all" else row[part] for row in rows)


def passkey_where(run: Run, variant: str, scaling: str, test: Callable[[int, int], bool]) -> Estimate | None:
    """Return passkey accuracy over the prompts whose (length, distance of the key) pass a test."""
    by_seed: dict[int, list[bool]] = {}
    for row in run.of("passkey", variant=variant, scaling=scaling):
        by_seed.setdefault(row.seed, []).extend(x["right"] for x in row.outcomes if test(row.length, x["distance"]))
    return share_of({"cases": len(right), "correct": sum(right)} for right in by_seed.values())


def scalings(run: Run, variant: str, *kinds: str) -> list[str]:
    """Return the scalings measured for a variant, "none" first, then by factor."""
    rows = [row for kind in kinds or ("perplexity", "passkey") for row in run.of(kind, variant=variant)]
    return sorted({row.scaling for row in rows}, key=scaling_order)


def scaling_order(scaling: str) -> tuple[bool, int, str]:
    """Return the sort key of a scaling.

    >>> sorted(["ntk-16", "ntk-4/per_request", "ntk-4", "none"], key=scaling_order)
    ['none', 'ntk-4', 'ntk-4/per_request', 'ntk-16']
    """
    digits = "".join(c for c in scaling.partition("/")[0] if c.isdigit())
    return (scaling != "none", int(digits or 0), scaling)


def lengths_of(run: Run, kind: str) -> list[int]:
    """Return the lengths of sliding windows, or of passkey prompts."""
    return sorted({row.length for row in run.of(kind) if row.get("mode", "sliding") == "sliding"})
