"""(model, tokens) → counts: perplexity and passkey retrieval at any length."""

from farspan.evaluation.passkey import passkey
from farspan.evaluation.perplexity import perplexity
from farspan.intervals import wilson

__all__ = ["passkey", "perplexity", "wilson"]
