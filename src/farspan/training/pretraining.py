"""Pre-training as a job: next-token prediction on token shards."""

import os
from collections.abc import Callable
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from farspan.configuration_farspan import FarspanConfig
from farspan.data import Batches, Shards, TextTokenizer, load_tokenizer
from farspan.data.batches import PasskeyDocument
from farspan.data.passkey import check_row, training_row
from farspan.data.retrieval import TRAINED, retrieval_row
from farspan.data.shards import read_manifest
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.ops.device import product_dtype
from farspan.training.config import DataSection, TrainConfig
from farspan.training.job import Job
from farspan.training.loop import Progress, run
from farspan.training.loss import linear_cross_entropy
from farspan.training.skipping import skipped_positions


class NextToken(nn.Module):
    """The objective of pre-training: ids (b, n+1) → mean loss of predicting each token from those before it.

    reach: positions go up to so many times the row (:mod:`farspan.training.skipping`); 1 = they count on.
    """

    def __init__(self, model: FarspanForCausalLM, *, reach: int = 1) -> None:
        super().__init__()
        self.model, self.reach = model, reach

    def forward(self, ids: Tensor) -> Tensor:
        positions = skipped_positions(ids[:, :-1], self.reach)
        hidden = self.model.model(ids[:, :-1], position_ids=positions, use_cache=False).last_hidden_state.flatten(0, 1)
        return linear_cross_entropy(hidden.to(product_dtype(hidden)), self.model.lm_head.weight, ids[:, 1:].flatten())


def train(
    config: TrainConfig, out: str | os.PathLike[str], *, report: Callable[[Progress], None] | None = None
) -> Path:
    """Pre-train, or go on where an earlier call stopped; return the folder of the finished model.

    Args:
        config: the whole run.
        out: its folder: checkpoints, ``metrics.jsonl``, TensorBoard events, and at the end ``model``.
        report: called every few steps.

    >>> from tempfile import TemporaryDirectory
    >>> from farspan.data import prepare
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.txt").write_text("the quick brown fox")
    ...     _ = prepare([f"{folder}/a.txt"], f"{folder}/tokens", valid_share=0, workers=1)
    ...     data = {"sources": {f"{folder}/tokens": 1.0}, "length": 8, "batch_size": 4}
    ...     small = {"preset": "tiny", "options": {"num_hidden_layers": 1}}
    ...     settings = {"model": small, "data": data, "optimizer": {"steps": 1}}
    ...     train(TrainConfig.parse(settings), f"{folder}/run").name
    'model'
    """
    return run(pretraining_job(config), out, report=report)


def pretraining_job(config: TrainConfig) -> Job:
    """The job a configuration describes."""

    @cache
    def tokenizer() -> TextTokenizer:
        first = next(iter(config.data.sources))
        read_manifest(first)  # or its name would be looked for on the hub
        return load_tokenizer(first)

    def start() -> FarspanForCausalLM:
        return FarspanForCausalLM(model_config(config, tokenizer().vocab_size, tokenizer().end))

    return Job(
        settings=asdict(config),
        optimizer=config.optimizer,
        run=config.run,
        batch_size=config.data.batch_size,
        tokens_per_row=config.data.length,
        start=start,
        load=FarspanForCausalLM.from_pretrained,
        batches=lambda: text_batches(config.data, tokenizer(), config.run.seed),
        objective=NextToken,
        write_beside=lambda folder: tokenizer().save(folder),
    )


def model_config(config: TrainConfig, vocab_size: int, end: int) -> FarspanConfig:
    """The model's configuration, its vocabulary and lengths taken from the data."""
    settings = {"vocab_size": vocab_size, "train_length": config.data.length, "eos_token_id": end}
    return FarspanConfig.preset(
        config.model.preset, attention=config.model.attention, **{**settings, **config.model.options}
    )


def text_batches(data: DataSection, tokenizer: TextTokenizer, seed: int) -> Batches:
    """Return random windows of the section's token folders, with passkey or retrieval rows mixed in."""
    make_row: PasskeyDocument = partial(training_row, tokenizer)
    if data.passkey_share:
        check_row(tokenizer, data.length, "data.length")
    elif data.retrieval_share:
        make_row = partial(retrieval_row, tokenizer)
        for task in TRAINED:  # raises if a row cannot hold it
            retrieval_row(tokenizer, np.random.default_rng(0), data.length + 1, (task,))
    return Batches(
        [(Shards(path), weight) for path, weight in data.sources.items()],
        data.length,
        data.batch_size,
        seed,
        passkey_share=data.passkey_share or data.retrieval_share,
        passkey_document=make_row,
    )
