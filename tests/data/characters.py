"""Tokenizers of one token per character."""


class Letters:
    """One token per character, not reversible."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) % 97 for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


class Exact:
    """One token per character, reversible."""

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))

    decode = Letters.decode
