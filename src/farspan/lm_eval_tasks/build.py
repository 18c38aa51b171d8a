"""Make the documents of the YAML files in this folder, and judge answers.

lm-eval hands ``--model_args`` and ``--metadata`` to the first kind together, as keyword arguments.
"""

import math
from collections.abc import Sequence
from typing import Any

from farspan.data import TextTokenizer, documents, load_tokenizer
from farspan.data.passkey import make_cases
from farspan.errors import require

Docs = list[dict[str, Any]]


def passkey(*, length: int = 512, cases: int = 100, seed: int = 0, **model: Any) -> dict[str, Any]:
    """Make the prompts of `farspan eval passkey --lengths LENGTH --cases CASES --seed SEED`, as text.

    lm-eval cuts the text into tokens again. Where filler was cut inside a word they may differ there, and the prompt is
    a few tokens shorter or longer. With a byte tokenizer they never do.
    """
    tokenizer = _tokenizer_of(model)
    made = make_cases(tokenizer, length, cases, seed)
    return _dataset([{"prompt": tokenizer.decode(case.prompt), "key": str(case.key)} for case in made])


def found(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Tell whether the key is in the continuation.

    >>> found({"key": "12345"}, [" The passkey is 12345."])
    {'accuracy': 1.0}
    """
    return {"accuracy": float(doc["key"] in results[0])}


def perplexity(
    *, text: str | list[str] = "", text_tokens: int = 32_768, texts: int = 100, **model: Any
) -> dict[str, Any]:
    """Cut documents that have so many tokens to them, as text with their number."""
    sources = [text] if isinstance(text, str) else text
    require(
        bool(sources and all(sources)), 'text must name files, got none; add --metadata \'{"text": "books.jsonl"}\''
    )
    tokenizer, docs = _tokenizer_of(model), Docs()
    for document in documents(sources):
        ids = tokenizer.encode(document.text)[:text_tokens]
        if len(ids) == text_tokens and len(docs) < texts:
            docs.append({"text": tokenizer.decode(ids), "tokens": text_tokens})
    require(
        bool(docs),
        f"text needs documents of text_tokens = {text_tokens} tokens, got none that long in {', '.join(sources)}; "
        "use longer texts or fewer tokens",
    )
    return _dataset(docs)


def losses(doc: dict[str, Any], results: Sequence[float]) -> dict[str, tuple[float, int]]:
    """Pair a document's log-likelihood with what each metric divides it by."""
    likelihood = float(results[0])
    return {"ppl": (likelihood, doc["tokens"]), "bits_per_byte": (likelihood, len(doc["text"].encode()))}


def token_perplexity(items: Sequence[tuple[float, int]]) -> float:
    """Compute exp(sum of losses / number of tokens).

    >>> round(token_perplexity([(-math.log(2) * 3, 3), (-math.log(8), 1)]), 3)
    2.828
    """
    return math.exp(-sum(likelihood for likelihood, _ in items) / sum(tokens for _, tokens in items))


def _dataset(docs: Docs) -> dict[str, Any]:
    from datasets import Dataset  # comes with lm-eval

    return {"test": Dataset.from_list(docs)}


def _tokenizer_of(model: dict[str, Any]) -> TextTokenizer:
    """Load the tokenizer of the model that lm-eval runs."""
    name = model.get("tokenizer") or model.get("pretrained") or model.get("model")
    require(
        isinstance(name, str),
        f"model_args must name the model or its tokenizer, got {', '.join(model) or 'none'}; add tokenizer=DIR",
    )
    return load_tokenizer(str(name))
