"""Each command of `farspan eval` as one function: a model's folder in, rows and a result file out.

Everything is checked before the model is loaded, which happens once per call. Under `torchrun` or `accelerate launch`
the processes share batches, cases and documents; each returns all rows, and the main one writes them.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, product
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
from farspan.evaluation.perplexity import bits_per_byte, loss_by_position, perplexity, truncation_control
from farspan.evaluation.retrieval import passkey, retrieval
from farspan.results import check_out, write_result
from farspan.utils import Progress, silent

if TYPE_CHECKING:
    from farspan.modeling_farspan import FarspanForCausalLM

Rows = list[dict[str, Any]]
PathLike = str | os.PathLike[str]
Text = Sequence[str] | Sequence[Tensor]
Measure = Callable[["FarspanForCausalLM", bool, Progress], Rows]
"""Measure an open model under one scaling; the second argument says whether it is the first."""


class Common(TypedDict, total=False):
    """Options of every command."""

    scalings: Sequence[str]
    label: Mapping[str, Any]
    force: bool
    progress: Progress


def evaluate_perplexity(
    model: PathLike,
    text: Text,
    out: PathLike | None = None,
    *,
    lengths: Sequence[int] = (512, 1024, 2048),
    stride: int = 512,
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
    longest = max(_checked(lengths, 2))
    need = f"--text-tokens must be at least the longest window {longest}, got {text_tokens}; raise it"
    require(longest <= text_tokens, need)
    trained = _check(model, out, common).train_length
    found = _sequences(model, text, text_tokens, texts, longest, trained)
    require(
        bool(found),
        f"--text must hold documents of at least {longest} tokens, the longest of --lengths, got none that long; "
        "use longer texts or shorter --lengths",
    )

    def measure(loaded: "FarspanForCausalLM", first: bool, progress: Progress) -> Rows:
        options: dict[str, Any] = {"tokens_at_once": tokens_at_once, "progress": progress}
        rows = [perplexity(loaded, found, length=length, stride=stride, **options) for length in lengths]
        if control and first and len(found[0]) >= trained:
            cut_length, cut_stride = truncation_control(trained)
            row = perplexity(loaded, found, length=cut_length, stride=cut_stride, **options)
            rows.append({**row, "mode": "truncated"})
        return rows

    return _measured("perplexity", model, out, measure, common)


def evaluate_positions(
    model: PathLike,
    text: Text,
    out: PathLike | None = None,
    *,
    texts: int = 100,
    text_tokens: int = 131_072,
    tokens_at_once: int = 2**16,
    **common: Unpack[Common],
) -> Rows:
    """Measure the loss by position, and the gain over a context cut to the training length on the same tokens."""
    needed = _check(model, out, common).train_length + 1
    found = _sequences(model, text, text_tokens, texts, needed, needed)
    require(bool(found), f"--text must hold documents of at least {needed} tokens, got none; use longer ones")

    def measure(loaded: "FarspanForCausalLM", _: bool, progress: Progress) -> Rows:
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
    shortest, _ = min(_checked(lengths, 1)), _check(model, out, common)
    tokenizer = _tokenizer(model)
    check_prompt(tokenizer, shortest, "--lengths")
    options: dict[str, Any] = {"cases": cases, "new_tokens": new_tokens, "tokens_at_once": tokens_at_once, "seed": seed}

    def measure(loaded: "FarspanForCausalLM", _: bool, progress: Progress) -> Rows:
        return [passkey(loaded, tokenizer, length=length, progress=progress, **options) for length in lengths]

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
    _checked(lengths, 1)
    for task in tasks:
        require_choice("--tasks", task, TASKS)
    _check(model, out, common)
    tokenizer = _tokenizer(model)
    check_retrieval(tokenizer, tasks, lengths)
    options: dict[str, Any] = {"cases": cases, "tokens_at_once": tokens_at_once, "seed": seed}

    def measure(loaded: "FarspanForCausalLM", _: bool, progress: Progress) -> Rows:
        made = (
            retrieval(loaded, tokenizer, task=task, length=length, progress=progress, **options)
            for task, length in product(tasks, lengths)
        )
        return [row for rows in made for row in rows]

    return _measured("retrieval", model, out, measure, common, seed)


def check_retrieval(tokenizer: TextTokenizer, tasks: Sequence[str], lengths: Sequence[int]) -> None:
    """Raise for the first task that has no prompt of some length."""
    for task, length in product(tasks, (min(lengths), max(lengths))):
        retrieval_case(tokenizer, task, length, np.random.default_rng(0), 0.5)


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

    def measure(loaded: "FarspanForCausalLM", _: bool, progress: Progress) -> Rows:
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
        texts: at most so many documents, each cut to `text_bytes`, between characters.
    """
    config = _check(model, out, common)
    found = [one.encode()[:text_bytes].decode(errors="ignore") for one in islice(_documents(text), texts)]
    require(bool(found), f"--text must hold at least one document, got none in {', '.join(text)}; name another file")
    tokenizer, start = _with_start(model, config)
    window = length or min(2048, config.train_length)

    def measure(loaded: "FarspanForCausalLM", _: bool, progress: Progress) -> Rows:
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
    own = loaded.config.rope_parameters or {}, loaded.config.log_length or False
    for number, name in enumerate(common.get("scalings") or ("own",)):
        if name.startswith("own") and number:  # an earlier scaling has replaced it
            loaded.set_rope_parameters(**own[0])
            loaded.set_log_length(own[1])
        set_scaling(loaded, name)
        with as_trained(where):
            made = measure(loaded, number == 0, progress)
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
        file = Path(model) / "tokenizer.json"
        check_tokenizer(Path(model), configuration(model).vocab_size)  # raises for broken files
        if not file.is_file():
            raise
        return TextTokenizer(Tokenizer.from_file(str(file)), end=-1)


def _with_start(model: PathLike, config: FarspanConfig) -> tuple[TextTokenizer, int]:
    """Return the tokenizer, and the token before a text: the model's own, else the end of the text before."""
    from farspan.checkpoints import text_tokenizer

    tokenizer, begin = text_tokenizer(model), config.bos_token_id
    return tokenizer, tokenizer.end if begin is None else int(begin)


def _checked(lengths: Sequence[int], least: int) -> Sequence[int]:
    require(bool(lengths), "--lengths must name at least one length, got none; try 512")
    short = [length for length in lengths if length < least]
    require(not short, f"--lengths must be at least {least}, got {short}; use the training length or more")
    return lengths


def _documents(sources: Sequence[str]) -> Iterator[str]:
    """Yield the texts of all sources; a missing one raises before the first is read."""
    for source in sources:
        resolve(source)
    return (document.text for source in sources for document in documents(source))


def _sequences(model: PathLike, text: Text, cut: int, most: int, needed: int, trained: int) -> list[Tensor]:
    """Return at most so many documents of the training length, else those that are long enough, cut to `cut` tokens."""
    goal = max(needed, trained) if trained <= cut else needed
    made: Iterable[Tensor] = [one for one in text if isinstance(one, Tensor)]
    if not made:
        tokenizer = _tokenizer(model)
        made = (torch.tensor(tokenizer.encode(one)) for one in _documents([str(source) for source in text]))
    long, short = list[Tensor](), list[Tensor]()
    for ids in made:
        if len(ids[:cut]) >= goal:
            long.append(ids[:cut])
        elif len(ids[:cut]) >= needed and len(short) < most:
            short.append(ids[:cut])
        if len(long) == most:
            break
    return long or short
