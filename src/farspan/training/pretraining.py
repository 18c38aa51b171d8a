"""Pre-training as a job: next-token prediction on token shards, with positions that may skip far ahead."""

import os
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from farspan.configuration_farspan import FarspanConfig
from farspan.data import Batches, Shards, TextTokenizer, load_tokenizer
from farspan.data.batches import MakeRow
from farspan.data.passkey import check_row, training_row
from farspan.data.retrieval import TRAINED, retrieval_row
from farspan.data.shards import read_manifest
from farspan.errors import require
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.ops.device import product_dtype
from farspan.training.config import DataSection, TrainConfig
from farspan.training.loop import Job, run
from farspan.training.loss import linear_cross_entropy
from farspan.utils import Progress, silent


class NextToken(nn.Module):
    """Mean loss of predicting each token of ids (b, n+1) from those before it.

    Positions go up to `reach` times the row (:func:`skipped_positions`); 1 = they count on.
    """

    def __init__(self, model: FarspanForCausalLM, *, reach: int = 1) -> None:
        super().__init__()
        self.model, self.reach = model, reach

    def forward(self, ids: Tensor) -> Tensor:
        hidden = last_hidden(self.model, ids[:, :-1], skipped_positions(ids[:, :-1], self.reach))
        return linear_cross_entropy(hidden, self.model.lm_head.weight, ids[:, 1:].flatten())


def last_hidden(model: FarspanForCausalLM, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """Compute what the head reads (b·n, width), in the dtype of autocast's products, for the fused losses."""
    read = model.model(ids, position_ids=positions, use_cache=False, return_dict=True)
    hidden = read.last_hidden_state.flatten(0, 1)
    return hidden.to(product_dtype(hidden))


def train(config: TrainConfig, out: str | os.PathLike[str], *, progress: Progress = silent) -> Path:
    """Pre-train, or go on where an earlier call stopped; return the folder of the finished model.

    Args:
        out: folder of the run: checkpoints, ``metrics.jsonl``, TensorBoard events, and at the end ``model``.
        progress: called every few steps.
    """
    config = TrainConfig.parse(asdict(config))  # one that was made in Python may hold anything
    return run(pretraining_job(config), out, progress=progress)


def pretraining_job(config: TrainConfig) -> Job:
    """Make the job that a configuration describes."""

    @cache
    def tokenizer() -> TextTokenizer:
        first = next(iter(config.data.sources))
        read_manifest(first)  # or its name would be searched on the hub
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


def model_config(config: TrainConfig, vocab_size: int, end: int | None) -> FarspanConfig:
    """Return the configuration of the model that is trained on tokens of a vocabulary; raise if it cannot be."""
    model = config.model
    data = {"vocab_size": vocab_size, "train_length": config.data.length, "eos_token_id": end}
    found = FarspanConfig.preset(model.preset, attention=model.attention, **{**data, **model.options})
    need = f"vocab_size must be at least the {vocab_size} tokens of the data, got {found.vocab_size}; leave it out"
    require(found.vocab_size >= vocab_size, need)
    flex = found._attn_implementation == "flex_attention" and not torch.cuda.is_available()
    require(not flex, "attn_implementation 'flex_attention' trains on a GPU only, and none is visible; leave it out")
    return found


def check_rows(data: DataSection, tokenizer: TextTokenizer, name: str) -> None:
    """Raise if rows of this length, which the user knows by `name`, hold no passkey or retrieval task."""
    if data.passkey_share:
        check_row(tokenizer, data.length, name)
    elif data.retrieval_share:
        for task in TRAINED:
            retrieval_row(tokenizer, np.random.default_rng(0), data.length + 1, (task,))


def text_batches(data: DataSection, tokenizer: TextTokenizer, seed: int, *, name: str = "data.length") -> Batches:
    """Return random windows of the section's token folders, with passkey or retrieval rows mixed in.

    Raise as :func:`check_rows` does.
    """
    check_rows(data, tokenizer, name)
    make_row: MakeRow = partial(training_row if data.passkey_share else retrieval_row, tokenizer)
    return Batches(
        [(Shards(path, verify=True), weight) for path, weight in data.sources.items()],
        data.length,
        data.batch_size,
        seed,
        passkey_share=data.passkey_share or data.retrieval_share,
        passkey_document=make_row,
    )


def skipped_positions(ids: Tensor, reach: int) -> Tensor | None:
    """Draw positions (b, n) for rows ids (b, n); None where reach is 1 and positions count on.

    Draw a length L from n, 2n, 4n … reach·n for each batch. With n itself positions count on. Otherwise move the second
    half of each row into L/2 … L-1, and the first before it: in half of the batches there as well, in the others at
    0 … n/2-1, so that all distances below L occur.

    Under `per_query` dynamic NTK, positions L/2 … L-1 have their own frequencies if n is a power of two times the
    training length. Then there are two sets of runs of queries that share frequencies, and blocks are compiled twice,
    not for each batch. The draws are a function of the tokens: no state to save, no random number to share.

    >>> near, far = skipped_positions(torch.tensor([[5, 6, 7, 8]]), 4)[0].view(2, 2)
    >>> near.diff().item(), far.diff().item(), (far[0] - near[0]).item() >= 2, far[1].item() < 16
    (1, 1, True, True)
    """
    if reach == 1:
        return None
    n = ids.shape[1]
    half = n // 2
    rows = _scattered((ids * torch.arange(1, n + 1, device=ids.device)).sum(-1))
    batch = _scattered(rows.sum())
    length = n << (batch // 2 % reach.bit_length())
    free = (length // 2 - n).clamp(min=0)
    one, other = rows % (free + 1), _scattered(rows + 1) % (free + 1)
    beside = length // 2 + torch.minimum(one, other), length // 2 + half + torch.maximum(one, other)
    apart = torch.zeros_like(rows), length // 2 + rows % (free + half + 1)
    first, second = (torch.where(batch % 2 == 0, a, b)[:, None] for a, b in zip(beside, apart, strict=True))
    count = torch.arange(n, device=ids.device)
    moved = torch.cat((first + count[:half], second + count[:half]), dim=1)
    return torch.where(length == n, count, moved)


def _scattered(numbers: Tensor) -> Tensor:
    """Hash whole numbers to 0 … 2³¹-1: a multiplication that wraps, and its high bits."""
    mixed = numbers * 6364136223846793005 + 1442695040888963407
    return (mixed ^ (mixed >> 29)) * 3202034522624059733 >> 33 & 0x7FFFFFFF
