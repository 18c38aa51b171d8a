"""Each command of `farspan eval` as one function: a model's folder in, rows and a result file out.

Everything is checked before the model is loaded, which happens once per call. Under `torchrun` or `accelerate launch`
the processes share batches, cases and documents; each returns the rows of one process, and the main one writes them.

The functions have these arguments in common:

- model: a farspan folder, or anything `farspan convert` reads, with its tokenizer.
- out: the result file; None writes none.
- scalings: names such as "none", "dynamic_ntk-4" or "yarn-4+log" (:func:`farspan.evaluation.set_scaling`), each
  measured in turn; "own", the default, is the model as it is configured.
- label: fields that every row begins with, such as a variant's name.
- force: whether an existing result may be replaced.
- progress: called with how far the work is.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from farspan.configuration_farspan import FarspanConfig
from farspan.data import TextTokenizer, documents
from farspan.data.passkey import check_prompt
from farspan.data.retrieval import TASKS, retrieval_case
from farspan.data.sources import resolve
from farspan.errors import require, require_choice
from farspan.evaluation.answers import minimal_pairs, read_pairs
from farspan.evaluation.conditions import as_trained, check_scaling, device, is_main, scaling_of, set_scaling
from farspan.evaluation.perplexity import MODES, bits_per_byte, first_bytes, loss_by_position, perplexity
from farspan.evaluation.perplexity import truncation_control as control_of
from farspan.evaluation.retrieval import passkey, retrieval
from farspan.results import check_out, write_result
from farspan.utils import Progress, silent

if TYPE_CHECKING:
    from farspan.modeling_farspan import FarspanForCausalLM

Rows = list[dict[str, Any]]
PathLike = str | os.PathLike[str]
Measure = Callable[["FarspanForCausalLM", Progress, bool], Rows]
"""Measure an open model under one scaling; the last argument says whether it is the first."""


class Common(TypedDict, total=False):
    """Options of every command."""

    scalings: Sequence[str]
    label: Mapping[str, Any]
    force: bool
    progress: Progress


def evaluate_perplexity(
    model: PathLike,
    text: Sequence[str] | Sequence[Tensor],
    out: PathLike | None = None,
    *,
    lengths: Sequence[int] = (512, 1024, 2048),
    stride: int = 512,
    mode: str = "sliding",
    texts: int = 100,
    text_tokens: int = 32_768,
    control: bool = True,
    tokens_at_once: int = 2**16,
    **common: Unpack[Common],
) -> Rows:
    """Measure perplexity by window length, with the truncation control under the first scaling.

    Documents of at least the training length are used, with the control; where there are none, those of at least the
    longest window, without it.

    Args:
        text: sources as `farspan data` takes them, or token sequences.
        texts: at most so many documents, each cut to `text_tokens`.
    """
    require_choice("--mode", mode, MODES[:-1])
    require(stride >= 1, f"--stride must be at least 1, got {stride}; the paper uses 512")
    needed = max(_lengths(lengths, 2))
    require(
        needed <= text_tokens,
        f"--text-tokens must be at least the longest window {needed}, got {text_tokens}; raise it",
    )
    config = _check(model, out, common)
    trained = config.train_length
    found = _sequences(model, text, text_tokens, texts, needed, trained)
    require(
        bool(found),
        f"--text must hold documents of at least {needed} tokens, the longest of --lengths, got none that long; "
        "use longer texts or shorter --lengths",
    )
    windows = [(length, stride, mode) for length in lengths]
    controls = [control_of(trained)] if control and len(found[0]) >= trained else []

    def measure(loaded: "FarspanForCausalLM", progress: Progress, first: bool) -> Rows:
        return [
            perplexity(
                loaded, found, length=n, stride=step, mode=name, tokens_at_once=tokens_at_once, progress=progress
            )
            for n, step, name in [*windows, *(controls if first else [])]
        ]

    return _measured("perplexity", model, out, measure, common)


def evaluate_positions(
    model: PathLike,
    text: Sequence[str] | Sequence[Tensor],
    out: PathLike | None = None,
    *,
    texts: int = 100,
    text_tokens: int = 131_072,
    tokens_at_once: int = 2**16,
    **common: Unpack[Common],
) -> Rows:
    """Measure the loss by position, and the gain over a context cut to the training length on the same tokens."""
    config = _check(model, out, common)
    needed = config.train_length + 1
    found = _sequences(model, text, text_tokens, texts, needed, needed)
    require(bool(found), f"--text must hold documents of at least {needed} tokens, got none; use longer ones")

    def measure(loaded: "FarspanForCausalLM", progress: Progress, first: bool) -> Rows:
        return loss_by_position(loaded, found, tokens_at_once=tokens_at_once, progress=progress)

    return _measured("positions", model, out, measure, common)


def evaluate_passkey(
    model: PathLike,
    out: PathLike | None = None,
    *,
    lengths: Sequence[int] = (512, 1024, 2048),
    cases: int = 100,
    new_tokens: int = 64,
    tokens_at_once: int = 2**17,
    seed: int = 0,
    **common: Unpack[Common],
) -> Rows:
    """Measure passkey retrieval by length, with Wilson intervals and the near/far split at the training length."""
    wanted = _lengths(lengths, 1)
    _check(model, out, common)
    tokenizer = _tokenizer(model)
    check_prompt(tokenizer, min(wanted), "--lengths")

    def measure(loaded: "FarspanForCausalLM", progress: Progress, first: bool) -> Rows:
        options: dict[str, Any] = {"cases": cases, "new_tokens": new_tokens, "seed": seed, "progress": progress}
        return [passkey(loaded, tokenizer, length=n, tokens_at_once=tokens_at_once, **options) for n in wanted]

    return _measured("passkey", model, out, measure, common, seed)


def evaluate_retrieval(
    model: PathLike,
    out: PathLike | None = None,
    *,
    tasks: Sequence[str] = ("abcdigits", "phonebook", "niah_multikey_2"),
    lengths: Sequence[int] = (512, 1024, 2048),
    cases: int = 100,
    tokens_at_once: int = 2**17,
    seed: int = 0,
    **common: Unpack[Common],
) -> Rows:
    """Measure retrieval tasks (:mod:`farspan.data.retrieval`) by length and depth, with Wilson intervals."""
    wanted = _lengths(lengths, 1)
    for name in tasks:
        require_choice("--tasks", name, TASKS)
    _check(model, out, common)
    tokenizer = _tokenizer(model)
    for name in tasks:
        for length in (min(wanted), max(wanted)):  # raises if a prompt cannot have this length
            retrieval_case(tokenizer, name, length, np.random.default_rng(seed), 0.5)

    def measure(loaded: "FarspanForCausalLM", progress: Progress, first: bool) -> Rows:
        options: dict[str, Any] = {"cases": cases, "seed": seed, "tokens_at_once": tokens_at_once, "progress": progress}
        made = [retrieval(loaded, tokenizer, task=name, length=n, **options) for name in tasks for n in wanted]
        return [row for rows in made for row in rows]

    return _measured("retrieval", model, out, measure, common, seed)


def evaluate_pairs(
    model: PathLike,
    pairs: Sequence[PathLike],
    out: PathLike | None = None,
    *,
    most: int | None = None,
    **common: Unpack[Common],
) -> Rows:
    """Measure how often the good sentence of a minimal pair is the likelier, by phenomenon, with Wilson intervals.

    most: at most so many pairs of each file; None = all.
    """
    config = _check(model, out, common)
    made = [pair for file in pairs for pair in islice(read_pairs(os.fspath(file)), most)]
    tokenizer, start = _with_start(model, config)

    def measure(loaded: "FarspanForCausalLM", progress: Progress, first: bool) -> Rows:
        return minimal_pairs(loaded, made, tokenizer.encode, start=start, progress=progress)

    return _measured("pairs", model, out, measure, common)


def evaluate_bits(
    model: PathLike,
    text: Sequence[str],
    out: PathLike | None = None,
    *,
    length: int | None = None,
    texts: int = 100,
    text_bytes: int = 100_000,
    **common: Unpack[Common],
) -> Rows:
    """Measure bits per byte of raw text: comparable between models with different tokens.

    Args:
        length: tokens per window; None takes the training length, at most 2048.
        texts: at most so many documents, each cut to `text_bytes`.
    """
    config = _check(model, out, common)
    found = [first_bytes(one, text_bytes) for one in islice(_documents(text), texts)]
    require(bool(found), f"--text must hold at least one document, got none in {', '.join(text)}; name another file")
    tokenizer, start = _with_start(model, config)
    window = length or min(2048, config.train_length)

    def measure(loaded: "FarspanForCausalLM", progress: Progress, first: bool) -> Rows:
        return [bits_per_byte(loaded, found, tokenizer.encode, start=start, length=window, progress=progress)]

    return _measured("bits", model, out, measure, common)


# What the commands share


def configuration(model: PathLike) -> FarspanConfig:
    """Read the configuration of anything that can be evaluated."""
    from farspan.checkpoints import config_of, open_source

    return config_of(open_source(Path(model)))


def open_model(model: PathLike, device: str) -> "FarspanForCausalLM":
    """Load anything that can be evaluated, in float32."""
    from farspan.checkpoints import from_pretrained

    return from_pretrained(model, attention=None, dtype=torch.float32, device=device)


def _check(model: PathLike, out: PathLike | None, common: Common) -> FarspanConfig:
    """Check what all commands are given, before any work begins."""
    if out is not None and is_main():
        check_out(Path(out), common.get("force", False))
    for name in common.get("scalings", ()):
        check_scaling(name, "--scaling")
    return configuration(model)


def _measured(
    kind: str, model: PathLike, out: PathLike | None, measure: Measure, common: Common, seed: int = 0
) -> Rows:
    """Open the model, measure it under each scaling, and write the rows with what made them."""
    from farspan.checkpoints import fingerprint, open_source

    rows: Rows = []
    where, progress = device(), common.get("progress", silent)
    loaded = open_model(model, where)
    own = loaded.config.rope_parameters, bool(loaded.config.log_length)
    for number, name in enumerate(common.get("scalings") or ("own",)):
        if name.startswith("own") and number:  # an earlier scaling has replaced it
            loaded.set_rope_parameters(**(own[0] or {}))
            loaded.set_log_length(own[1])
        set_scaling(loaded, name)
        with as_trained(where):
            made = measure(loaded, progress, number == 0)
        rows += [{**common.get("label", {}), **row, "scaling": scaling_of(loaded.config)} for row in made]
    if out is not None and is_main():
        write_result(out, rows, device=where, seed=seed, kind=kind, model=fingerprint(open_source(Path(model))))
    return rows


def _tokenizer(model: PathLike) -> TextTokenizer:
    """Return the tokenizer beside a model. Long texts need no end-of-text token, so it may have none."""
    from tokenizers import Tokenizer

    from farspan.checkpoints.sources import check_tokenizer, text_tokenizer

    try:
        return text_tokenizer(model)
    except ValueError:
        check_tokenizer(Path(model), configuration(model).vocab_size)  # raises for broken files
        try:
            return TextTokenizer(Tokenizer.from_file(str(Path(model) / "tokenizer.json")), end=-1)
        except Exception:  # the library raises plain Exception; the first error says more
            pass
        raise


def _with_start(model: PathLike, config: FarspanConfig) -> tuple[TextTokenizer, int]:
    """Return the tokenizer, and the token before a text: the model's own, else the end of the text before."""
    from farspan.checkpoints import text_tokenizer

    tokenizer, begin = text_tokenizer(model), config.bos_token_id
    return tokenizer, tokenizer.end if begin is None else int(begin)


def _lengths(lengths: Sequence[int], least: int) -> list[int]:
    require(bool(lengths), "--lengths must name at least one length, got none; try 512")
    short = [length for length in lengths if length < least]
    require(not short, f"--lengths must be at least {least}, got {short}; use the training length or more")
    return list(lengths)


def _documents(sources: Sequence[str]) -> Iterator[str]:
    """Yield the texts of all sources; a missing one raises before the first is read."""
    for source in sources:
        resolve(source)
    return (document.text for source in sources for document in documents(source))


def _sequences(
    model: PathLike,
    text: Sequence[str] | Sequence[Tensor],
    cut: int,
    most: int,
    needed: int,
    trained: int,
) -> list[Tensor]:
    """Return at most so many documents of the training length, else all that are long enough, cut to `cut` tokens."""
    goal, long, short = max(needed, trained), list[Tensor](), list[Tensor]()
    given = [one for one in text if isinstance(one, Tensor)]
    if given:
        made: Iterator[Tensor] = iter(given)
    else:
        tokenizer = _tokenizer(model)
        made = (torch.tensor(tokenizer.encode(one)) for one in _documents([str(source) for source in text]))
    for ids in made:
        ids = ids[:cut]
        if len(ids) >= goal:
            long.append(ids)
        elif len(ids) >= needed and len(short) < most:
            short.append(ids)
        if len(long) == most or (cut < goal and len(short) == most):
            break
    return long or short
