"""(model, tokens) → counts: perplexity and passkey retrieval at any length, and skills at short ones."""

from farspan.evaluation.bits import bits_per_byte, start_token
from farspan.evaluation.pairs import minimal_pairs, read_pairs
from farspan.evaluation.passkey import passkey
from farspan.evaluation.perplexity import perplexity, tokens_read
from farspan.evaluation.precision import as_trained
from farspan.intervals import wilson

__all__ = [
    "as_trained",
    "bits_per_byte",
    "minimal_pairs",
    "passkey",
    "perplexity",
    "read_pairs",
    "start_token",
    "tokens_read",
    "wilson",
]
