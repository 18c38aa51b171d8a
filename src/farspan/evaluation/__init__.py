"""(model, tokens) → counts: perplexity and passkey retrieval at any length."""

from farspan.evaluation.intervals import wilson
from farspan.evaluation.passkey import passkey
from farspan.evaluation.perplexity import perplexity

__all__ = ["passkey", "perplexity", "wilson"]
