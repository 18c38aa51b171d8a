"""A model of every kind of layer, and its exported folder."""

from pathlib import Path

import pytest
import torch

from farspan.data import load_tokenizer
from tests.command_line import called
from tests.export.rows import passkey, perplexity, result
from tests.models.small import MIXED, make

LAYERS = [*MIXED, "alibi", "cosformer", "linear-coca"]
"""Every kind of layer, a window and one without positions."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, as training leaves it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("trained")
    options = {"num_hidden_layers": len(LAYERS), "vocab_size": 257, "train_length": 64}
    make(LAYERS, dtype=torch.float32, cosformer_beyond="decay", **options).save_pretrained(folder)
    load_tokenizer("bytes").save(folder)
    return folder


@pytest.fixture(scope="module")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("exported")
    rows = [perplexity(512, 20.25), perplexity(1024, 19.5), perplexity(64, 21.0, mode="truncated")]
    first = result(parent / "ppl.json", rows, command="farspan eval ppl `x`")
    second = result(parent / "ntk.json", [perplexity(1024, 18.75, "ntk-4")])
    third = result(parent / "keys.json", [passkey(512, 7)])
    options = [part for file in (first, second, third) for part in ("--results", file)]
    options += ["--name", "owner/toy", "--license", "apache-2.0"]
    status, out, err = called("export", trained, "--out", parent / "owner" / "toy", *options)
    assert status == 0, err
    assert "written: " in out
    return parent / "owner" / "toy"
