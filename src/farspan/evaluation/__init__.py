"""Measure trained models: perplexity, loss by position and retrieval at any length, and skills at short ones."""

from farspan.evaluation.bits import bits_per_byte, start_token
from farspan.evaluation.pairs import minimal_pairs, read_pairs
from farspan.evaluation.perplexity import perplexity, tokens_read
from farspan.evaluation.positions import loss_by_position
from farspan.evaluation.precision import as_trained
from farspan.evaluation.retrieval import passkey, retrieval
from farspan.intervals import wilson

__all__ = [
    "as_trained",
    "bits_per_byte",
    "loss_by_position",
    "minimal_pairs",
    "passkey",
    "perplexity",
    "read_pairs",
    "retrieval",
    "start_token",
    "tokens_read",
    "wilson",
]
