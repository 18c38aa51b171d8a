"""Corpora → token shards → batches."""

from farspan.data.batches import Batches
from farspan.data.prepare import prepare
from farspan.data.shards import Shards
from farspan.data.sources import Document, documents
from farspan.data.tokenizer import TextTokenizer, load_tokenizer, train_bpe

__all__ = [
    "Batches",
    "Document",
    "Shards",
    "TextTokenizer",
    "documents",
    "load_tokenizer",
    "prepare",
    "train_bpe",
]
