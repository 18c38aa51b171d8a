"""(model, tokens) → counts: perplexity and passkey retrieval at any length."""

from farspan.evaluation.passkey import passkey
from farspan.evaluation.perplexity import perplexity, tokens_read
from farspan.evaluation.precision import as_trained
from farspan.intervals import wilson

__all__ = ["as_trained", "passkey", "perplexity", "tokens_read", "wilson"]
