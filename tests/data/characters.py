"""Tokenizers of one token a character."""


class Letters:
    """A tokenizer of one token a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) % 97 for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


class Exact:
    """One token a character, reversible."""

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))

    decode = Letters.decode
