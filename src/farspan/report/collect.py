"""A run folder's result files → typed records; what cannot be read is refused with the file's name."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from farspan.errors import require
from farspan.report.inference import DECODE, KERNELS, Inferred, parse_inference
from farspan.report.looks import Look, parse_look
from farspan.report.records import (
    Bits,
    CacheBytes,
    Measurement,
    Pairs,
    Passkey,
    Perplexity,
    Source,
    Step,
    StudyModel,
    StudyRecord,
    TaskResult,
    Training,
    parse_measurement,
    parse_plain,
    parse_source,
    parse_step,
)
from farspan.report.timings import Timing, parse_timings

Keyed = TypeVar("Keyed", Timing, Inferred)
Evaluated = Perplexity | Passkey | Bits | Pairs
"""What `farspan eval` measures."""


@dataclass(frozen=True)
class Run:
    """All that a run folder holds."""

    perplexity: tuple[Perplexity, ...]
    passkey: tuple[Passkey, ...]
    training: tuple[Training, ...]
    sources: tuple[Source, ...]
    steps: tuple[Step, ...]
    looks: tuple[Look, ...] = ()
    """Models that `farspan analyze` looked at."""
    tasks: tuple[TaskResult, ...] = ()
    """Models trained for a task of their own."""
    study: tuple[StudyModel, ...] = ()
    """Models of a drop-in study, whose perplexity and passkey rows bear their names, and what else is known of them."""
    bits: tuple[Bits, ...] = ()
    pairs: tuple[Pairs, ...] = ()
    caches: tuple[CacheBytes, ...] = ()
    timings: tuple[Timing, ...] = ()
    """Attention alone, or one layer, against length."""
    inference: tuple[Inferred, ...] = ()
    """CoCA's model and kernels decoding and reading, beside RoPE's."""

    @property
    def is_study(self) -> bool:
        """Whether this is a drop-in study, perhaps one that has no model yet."""
        return bool(self.study) or any(step.step.startswith("convert ") for step in self.steps)

    @property
    def rows(self) -> list[Perplexity | Passkey | Training]:
        """Every record."""
        return [*self.training, *self.perplexity, *self.passkey]

    @property
    def train_length(self) -> int | None:
        """The training length; without training records the shortest length measured, None when nothing was."""
        if self.training:
            return self.training[0].length
        return min((row.length for row in self.rows), default=None)


def collect(folder: Path) -> Run:
    """Read `results/ppl-*`, `passkey-*`, `train-*`, `task-*`, `analysis-*.json`; if there, `status.json`.

    Of speed `speed-*` (cosFormer), `layer-*`, `decode-*` and `coca-kernels-*.json` (CoCA); of a drop-in study
    `model-*`, `bits-*`, `pairs-*` and `cache-*.json`.
    """
    results = folder / "results"
    require(
        results.is_dir() or (folder / "status.json").is_file(),
        f"folder must hold results/*.json, got {folder}; run `farspan reproduce --out {folder}` first",
    )
    sources: list[Source] = []
    perplexity = _rows(Perplexity, results, "ppl", sources)
    passkey = _rows(Passkey, results, "passkey", sources)
    training = _rows(Training, results, "train", sources)
    tasks = _rows(TaskResult, results, "task", sources)
    looks = _looks(results, sources)
    timings, inference = _timings(results, sources), _inference(results, sources)
    study = _records(StudyModel, results, "model", sources)
    bits, pairs = _records(Bits, results, "bits", sources), _records(Pairs, results, "pairs", sources)
    caches = _records(CacheBytes, results, "cache", sources)
    steps = _steps(folder / "status.json")
    require(
        bool(sources or steps),
        f"{results} must hold ppl-, passkey-, train-, task-, speed-, layer-, decode- or analysis-*.json; "
        "run `farspan reproduce` first",
    )
    lengths = sorted({row.length for row in training})
    require(
        len(lengths) <= 1,
        f"{results}/train-*.json: length must be the same for every variant, got {lengths}; report them separately",
    )
    return Run(
        perplexity,
        passkey,
        training,
        tuple(sources),
        steps,
        looks=looks,
        tasks=tasks,
        study=study,
        bits=bits,
        pairs=pairs,
        caches=caches,
        timings=timings,
        inference=inference,
    )


def collect_files(paths: Sequence[Path], variant: str) -> Run:
    """What `farspan eval` wrote about one model, called `variant` where the rows themselves have no name for it."""
    sources: list[Source] = []
    found: dict[tuple[Any, ...], Evaluated] = {}
    for path in paths:
        require(path.is_file(), f"results must be files of `farspan eval`, got {str(path)!r}, which is none")
        for i, raw in enumerate(_result(path, sources)):
            with _errors_name(f"{path} row {i}"):
                row = _evaluated(raw, variant, sources[-1].seed)
                key = row.key if isinstance(row, Bits | Pairs) else (row.seed, row.scaling, row.length, row.mode)
                name = ", ".join(str(part) for part in key if part != "")
                require(
                    found.setdefault(key, row) == row,
                    f"{name} was measured before with another outcome; leave one of the two out",
                )
    variants = sorted({row.variant for row in found.values()})
    require(len(variants) <= 1, f"results must be about one model, got rows of {', '.join(variants)}; separate them")
    rows = list(found.values())
    return Run(
        tuple(row for row in rows if isinstance(row, Perplexity)),
        tuple(row for row in rows if isinstance(row, Passkey)),
        (),
        tuple(sources),
        (),
        bits=tuple(row for row in rows if isinstance(row, Bits)),
        pairs=tuple(row for row in rows if isinstance(row, Pairs)),
    )


def _evaluated(raw: Any, variant: str, seed: int) -> Evaluated:
    """A row of any of the four commands, told by what only its rows have."""
    require(
        isinstance(raw, dict) and any(name in raw for name in ("ppl", "bits_per_byte", "correct")),
        f"a row must have ppl, bits_per_byte or correct, got {str(raw)[:60]}; give files of `farspan eval`",
    )
    named = {"variant": variant, "seed": seed, **raw}
    if "bits_per_byte" in raw:
        return parse_plain(Bits, named)
    if "kind" in raw:
        return parse_plain(Pairs, named)
    return parse_measurement(Perplexity, named) if "ppl" in raw else parse_measurement(Passkey, named)


def _rows(kind: type[Measurement], folder: Path, prefix: str, sources: list[Source]) -> tuple[Measurement, ...]:
    """All rows of the files with this prefix; the same measurement twice is refused, for neither is known right."""
    found: dict[tuple[Any, ...], tuple[Path, Measurement]] = {}
    for path, raws in _measured(folder, prefix, sources):
        for i, raw in enumerate(raws):
            with _errors_name(f"{path} row {i}"):
                row = parse_measurement(kind, raw)
            key = (row.variant, row.seed, row.scaling, row.length, row.mode)
            if key in found:
                raise ValueError(
                    f"{path} row {i} must be the only one for {', '.join(map(str, key))}, got another in "
                    f"{found[key][0].name}; remove one of the two"
                )
            found[key] = (path, row)
    return tuple(row for _, row in found.values())


def _records(kind: type[StudyRecord], folder: Path, prefix: str, sources: list[Source]) -> tuple[StudyRecord, ...]:
    """All rows of the files with this prefix."""
    found = []
    for path, raws in _measured(folder, prefix, sources):
        for i, raw in enumerate(raws):
            with _errors_name(f"{path} row {i}"):
                found.append(parse_plain(kind, raw))
    return tuple(found)


def _measured(folder: Path, prefix: str, sources: list[Source]) -> Iterator[tuple[Path, list[Any]]]:
    """The files with this prefix and their rows, less those of `bench model`, which may be called ``model-x.json``."""
    for path in sorted(folder.glob(f"{prefix}-*.json")):
        own: list[Source] = []
        rows = _result(path, own)
        if not _is_benchmark(rows):
            sources += own
            yield path, rows


def _is_benchmark(rows: list[Any]) -> bool:
    """Whether these are rows of `bench model`."""
    return any(isinstance(row, dict) and row.get("kind") in ("training", "window") for row in rows)


def _timings(folder: Path, sources: list[Source]) -> tuple[Timing, ...]:
    """Of cosFormer's speed one file; of CoCA's layers several, as every row has ratios within one run of its own."""
    speeds = sorted(folder.glob("speed-*.json"))
    require(
        len(speeds) <= 1,
        f"{folder} must hold one speed-*.json, got {', '.join(path.name for path in speeds)}: times of two runs "
        "do not compare; report them separately",
    )
    paths = [*speeds, *sorted(folder.glob("layer-*.json"))]
    return _each_once((path, row) for path in paths for row in parse_timings(_result(path, sources), path))


def _inference(folder: Path, sources: list[Source]) -> tuple[Inferred, ...]:
    """CoCA's model and its kernels; with its layers, they must come from one device."""
    found: list[tuple[Path, Inferred]] = []
    for prefix in (DECODE, KERNELS):
        for path in sorted(folder.glob(f"{prefix}-*.json")):
            rows = _result(path, sources)
            absolute = not sources[-1].device.startswith("CPU")
            found += [(path, row) for row in parse_inference(rows, path, prefix, absolute=absolute)]
    devices = sorted({x.device for x in sources if x.file.startswith(("layer-", f"{DECODE}-", f"{KERNELS}-"))})
    require(
        len(devices) <= 1,
        f"{folder} must hold CoCA's speed on one device, got {', '.join(devices)}; report them separately",
    )
    return _each_once(found)


def _each_once(rows: Iterable[tuple[Path, Keyed]]) -> tuple[Keyed, ...]:
    """The rows of several files; the same measurement twice is refused, for neither is known right."""
    found: dict[tuple[Any, ...], tuple[Path, Keyed]] = {}
    for path, row in rows:
        require(
            row.key not in found,
            f"{path} must not repeat {', '.join(str(part) for part in row.key if part != '')}, "
            f"which is in {found.get(row.key, (path, row))[0].name}; remove one of the two",
        )
        found[row.key] = (path, row)
    return tuple(row for _, row in found.values())


def _looks(folder: Path, sources: list[Source]) -> tuple[Look, ...]:
    found = [parse_look(_result(path, sources), path) for path in sorted(folder.glob("analysis-*.json"))]
    return tuple(sorted(found, key=lambda look: (look.model["attention"] != "rope", look.label)))  # the baseline first


def _result(path: Path, sources: list[Source]) -> list[Any]:
    """The rows of a result file; its provenance is noted among the sources."""
    data = _load(path)
    require(
        isinstance(data, dict) and data.get("schema") == 1 and isinstance(data.get("rows"), list),
        f"{path} must be a result file of schema 1 with rows, got another JSON; write it with `farspan`",
    )
    with _errors_name(path):
        sources.append(parse_source(path.name, data))
    rows: list[Any] = data["rows"]
    return rows


def _steps(path: Path) -> tuple[Step, ...]:
    if not path.is_file():
        return ()
    data = _load(path)
    require(isinstance(data, list), f"{path} must be a list of steps, got {type(data).__name__}; delete it")
    with _errors_name(path):
        return tuple(parse_step(raw) for raw in data)


@contextmanager
def _errors_name(where: object) -> Iterator[None]:
    """Errors inside say which file they are about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _load(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        if '"schema": 2' in text:  # bridge until merged
            text = text.replace('"schema": 2', '"schema": 1').replace('"dynamic_ntk-', '"ntk-')
        return json.loads(text)
    except ValueError as error:  # bad JSON and bad UTF-8 alike
        raise ValueError(f"{path} must be a JSON file, got {error}; make it again, or leave it out") from error
