"""Each command of `farspan eval` as one function: a model's folder in, rows and a result file out.

Everything is checked before the weights are loaded, which happens once per call. Under `torchrun` or `accelerate
launch` the processes share batches, cases and documents; each returns all rows, and the main one writes them.

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
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from farspan.checkpoints.configuration import config_of
from farspan.checkpoints.convert import fingerprint, load
from farspan.checkpoints.sources import check_tokenizer, open_source, text_tokenizer
from farspan.configuration_farspan import FarspanConfig
from farspan.data import TextTokenizer, documents
from farspan.data.passkey import check_prompt
from farspan.data.retrieval import TASKS, retrieval_case
from farspan.errors import require, require_choice
from farspan.evaluation.answers import passkey, retrieval
from farspan.evaluation.conditions import as_trained, check_scaling, device, is_main, scaling_of, set_scaling
from farspan.evaluation.losses import bits_per_byte, loss_by_position, perplexity, truncation_control
from farspan.evaluation.pairs import minimal_pairs, read_pairs
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.results import check_out, write_result
from farspan.utils import Progress, silent

Rows = list[dict[str, Any]]
PathLike = str | os.PathLike[str]
Text = Sequence[str] | Sequence[Tensor]


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
    **common: Any,
) -> Rows:
    """Measure perplexity by window length, with the truncation control under the first scaling.

    Documents of at least the training length are used, with the control; where there are none, those of at least the
    longest window, without it.

    Args:
        text: sources as `farspan data` takes them, or token sequences.
        texts: at most so many documents, each cut to `text_tokens`.
    """
    shortest, longest = min(lengths, default=0), max(lengths, default=0)
    require(shortest >= 2, f"--lengths must be at least 2, got {shortest}; use the training length or more")
    need = f"--text-tokens must be at least the longest window {longest}, got {text_tokens}; raise it"
    require(longest <= text_tokens, need)
    opened = _Opened(model, out, **common)
    trained = opened.config.train_length
    found = opened.sequences(text, text_tokens, texts, longest)
    require(
        bool(found),
        f"--text must hold documents of at least {longest} tokens, the longest of --lengths, got none that long; "
        "use longer texts or shorter --lengths",
    )
    row = partial(perplexity, texts=found, tokens_at_once=tokens_at_once, progress=opened.progress)

    def measure(loaded: FarspanForCausalLM, first: bool) -> Iterator[dict[str, Any]]:
        yield from (row(loaded, length=length, stride=stride) for length in lengths)
        if control and first and len(found[0]) >= trained:
            cut_length, cut_stride = truncation_control(trained)
            yield {**row(loaded, length=cut_length, stride=cut_stride), "mode": "truncated"}

    return opened.measured("perplexity", measure)


def evaluate_positions(
    model: PathLike,
    text: Text,
    out: PathLike | None = None,
    *,
    texts: int = 100,
    text_tokens: int = 131_072,
    **common: Any,
) -> Rows:
    """Measure the loss by position, and the gain over a context cut to the training length on the same tokens."""
    opened = _Opened(model, out, **common)
    needed = opened.config.train_length + 1
    found = opened.sequences(text, text_tokens, texts, needed)
    require(bool(found), f"--text must hold documents of at least {needed} tokens, got none; use longer ones")
    return opened.measured("positions", lambda loaded, _: loss_by_position(loaded, found, progress=opened.progress))


def evaluate_passkey(
    model: PathLike,
    out: PathLike | None = None,
    *,
    lengths: Sequence[int] = (512, 1024, 2048),
    cases: int = 100,
    new_tokens: int = 64,
    tokens_at_once: int = 2**17,
    seed: int = 0,
    **common: Any,
) -> Rows:
    """Measure passkey retrieval by length, with Wilson intervals and the near/far split at the training length."""
    opened = _Opened(model, out, **common)
    tokenizer = opened.tokenizer()
    check_prompt(tokenizer, min(lengths, default=0), "--lengths")
    how: dict[str, Any] = {"cases": cases, "new_tokens": new_tokens, "tokens_at_once": tokens_at_once, "seed": seed}
    how["progress"] = opened.progress

    def measure(loaded: FarspanForCausalLM, _: bool) -> Iterator[dict[str, Any]]:
        yield from (passkey(loaded, tokenizer, length=length, **how) for length in lengths)

    return opened.measured("passkey", measure, seed)


def evaluate_retrieval(
    model: PathLike,
    out: PathLike | None = None,
    *,
    tasks: Sequence[str] = ("abcdigits", "phonebook", "niah_multikey_2"),
    lengths: Sequence[int] = (512, 1024, 2048),
    cases: int = 100,
    tokens_at_once: int = 2**17,
    seed: int = 0,
    **common: Any,
) -> Rows:
    """Measure retrieval tasks (:mod:`farspan.data.retrieval`) by length and depth, with Wilson intervals."""
    for task in tasks:
        require_choice("--tasks", task, TASKS)
    opened = _Opened(model, out, **common)
    tokenizer = opened.tokenizer()
    check_retrieval(tokenizer, tasks, lengths)
    how: dict[str, Any] = {"cases": cases, "tokens_at_once": tokens_at_once, "seed": seed}
    how["progress"] = opened.progress

    def measure(loaded: FarspanForCausalLM, _: bool) -> Iterator[dict[str, Any]]:
        for task, length in product(tasks, lengths):
            yield from retrieval(loaded, tokenizer, task=task, length=length, **how)

    return opened.measured("retrieval", measure, seed)


def check_retrieval(tokenizer: TextTokenizer, tasks: Sequence[str], lengths: Sequence[int]) -> None:
    """Raise for the first task that has no prompt of some length."""
    for task, length in product(tasks, (min(lengths, default=0), max(lengths, default=0))):
        retrieval_case(tokenizer, task, length, np.random.default_rng(0), 0.5)


def evaluate_pairs(
    model: PathLike,
    pairs: Sequence[PathLike],
    out: PathLike | None = None,
    *,
    most: int | None = None,
    **common: Any,
) -> Rows:
    """Measure how often the good sentence of a minimal pair is the likelier, by phenomenon, with Wilson intervals.

    most: at most so many pairs of each file; None = all.
    """
    opened = _Opened(model, out, **common)
    made = [pair for file in pairs for pair in islice(read_pairs(os.fspath(file)), most)]
    how = {**opened.encoding(), "progress": opened.progress}
    return opened.measured("pairs", lambda loaded, _: minimal_pairs(loaded, made, **how))


def evaluate_bits(
    model: PathLike,
    text: Sequence[str],
    out: PathLike | None = None,
    *,
    length: int | None = None,
    texts: int = 100,
    text_bytes: int = 100_000,
    **common: Any,
) -> Rows:
    """Measure bits per byte of raw text: comparable between models with different tokens.

    Args:
        length: tokens per window; None takes the training length, at most 2048.
        texts: at most so many documents, each cut to `text_bytes`, between characters.
    """
    opened = _Opened(model, out, **common)
    require(length is None or length >= 2, f"--length must be at least 2, got {length}; leave it out")
    found = [one.text.encode()[:text_bytes].decode(errors="ignore") for one in islice(documents(text), texts)]
    require(bool(found), f"--text must hold at least one document, got none in {', '.join(text)}; name another file")
    how = {**opened.encoding(), "length": length or min(2048, opened.config.train_length)}
    return opened.measured("bits", lambda loaded, _: [bits_per_byte(loaded, found, progress=opened.progress, **how)])


# What the commands share


def configuration(model: PathLike) -> FarspanConfig:
    """Read the configuration of anything that can be evaluated."""
    return config_of(open_source(Path(model)))


class _Opened:
    """A model that is opened once: its configuration and tokenizer at first, its weights when it is measured."""

    def __init__(
        self,
        model: PathLike,
        out: PathLike | None,
        *,
        scalings: Sequence[str] = ("own",),
        label: Mapping[str, Any] | None = None,
        force: bool = False,
        progress: Progress = silent,
    ) -> None:
        if out is not None and is_main():
            check_out(Path(out), force)
        for name in scalings:
            check_scaling(name, "--scaling")
        self.path, self.out, self.label = Path(model), out, label or {}
        self.scalings = scalings or ("own",)
        self.source, self.progress = open_source(self.path), progress
        self.config = config_of(self.source)

    def tokenizer(self) -> TextTokenizer:
        """Return the tokenizer beside a model. Long texts need no end-of-text token, so it may have none."""
        try:
            return text_tokenizer(self.path)
        except ValueError:
            file = self.path / "tokenizer.json"
            check_tokenizer(self.path, self.config.vocab_size)  # raises for broken files
            if not file.is_file():
                raise
            return TextTokenizer(Tokenizer.from_file(str(file)), end=-1)

    def encoding(self) -> dict[str, Any]:
        """Return how to encode a text, and the token before it: the model's own, else the end of the text before."""
        tokenizer, begin = text_tokenizer(self.path), self.config.bos_token_id
        return {"encode": tokenizer.encode, "start": tokenizer.end if begin is None else int(begin)}

    def sequences(self, text: Text, cut: int, most: int, needed: int) -> list[Tensor]:
        """Return at most so many documents of the training length, else those that are long enough, cut to `cut`."""
        trained = self.config.train_length
        goal = max(needed, trained) if trained <= cut else needed
        made: Iterable[Tensor] = [one for one in text if isinstance(one, Tensor)]
        if not made:
            tokenizer = self.tokenizer()
            made = (torch.tensor(tokenizer.encode(one.text)) for one in documents([str(source) for source in text]))
        long, short = list[Tensor](), list[Tensor]()
        for ids in made:
            if len(ids[:cut]) >= goal:
                long.append(ids[:cut])
            elif len(ids[:cut]) >= needed and len(short) < most:
                short.append(ids[:cut])
            if len(long) == most:
                break
        return long or short

    def measured(
        self, kind: str, measure: Callable[[FarspanForCausalLM, bool], Iterable[dict[str, Any]]], seed: int = 0
    ) -> Rows:
        """Load the model, measure it under each scaling, and write the rows with what made them.

        `measure` gets the model, and whether this is the first scaling.
        """
        rows, where = Rows(), device()
        loaded = load(self.source, dtype=torch.float32, device=where)
        for number, name in enumerate(self.scalings):
            if name.startswith("own") and number:  # an earlier scaling has replaced it
                loaded.set_rope_parameters(**(self.config.rope_parameters or {}))
                loaded.set_log_length(self.config.log_length or False)
            set_scaling(loaded, name)
            with as_trained(where):
                made = list(measure(loaded, number == 0))
            rows += [{**self.label, **row, "scaling": scaling_of(loaded.config)} for row in made]
        if self.out is not None and is_main():
            write_result(self.out, rows, device=where, seed=seed, kind=kind, model=fingerprint(self.source))
        return rows
