"""Text ↔ token ids: a byte-level BPE trained here, plain bytes, or any tokenizer of the transformers library."""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from farspan.errors import require
from farspan.utils import read_settings, write_json, write_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END = "<|endoftext|>"
BYTES_VOCABULARY = 257
"""The end token and every byte."""
LARGEST = 2**20
"""Largest vocabulary that is trained: the trainer reserves memory for all of it at once."""
USUAL_ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
PIECE, GROUP = 2**16, 2**20
"""Characters of a piece, which one thread tokenizes, and of the pieces at once: an encoding takes a hundred times the
memory of its text."""
Key = TypeVar("Key")


class TextTokenizer:
    """A tokenizer, its end-of-text id and its fingerprint.

    Special tokens written out in a text are read as ordinary characters: no document can fake another's end.

    >>> tokenizer = load_tokenizer("bytes")
    >>> tokenizer.encode("Hé"), tokenizer.decode([73, 196, 170]), tokenizer.vocab_size, tokenizer.end
    ([73, 196, 170], 'Hé', 257, 0)
    """

    def __init__(self, backend: "Tokenizer", end: int) -> None:
        # A tokenizer.json may carry a truncation for its old model: it would silently cut every document.
        backend.no_truncation()
        backend.no_padding()
        self._json = backend.to_str()
        backend.encode_special_tokens = True
        self._backend = backend
        self.end = end
        self.vocab_size: int = max(backend.get_vocab().values()) + 1
        self.fingerprint = hashlib.sha256(self._json.encode()).hexdigest()
        self._plain_bytes = self.vocab_size == BYTES_VOCABULARY and self._json == _bytes_backend().to_str()
        probe = ("A b,", "\nc d\n")
        whole, *halves = self._ids(["".join(probe), *probe])
        self._cuttable = np.array_equal(whole, np.concatenate(halves))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without an end token."""
        ids: list[int] = self.ids([text])[0].tolist()
        return ids

    def ids(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Return the ids of each text, which the threads of the library compute."""
        if self._plain_bytes:
            return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) + 1 for text in texts]
        parts = (cut(text) if self._cuttable else [text] for text in texts)
        pieces = ((number, piece) for number, part in enumerate(parts) for piece in part)
        found: list[list[npt.NDArray[np.int64]]] = [[] for _ in texts]
        for group in grouped(pieces, GROUP):
            for (number, _), ids in zip(group, self._ids([piece for _, piece in group]), strict=True):
                found[number].append(ids)
        return [np.concatenate(ids) for ids in found]

    def _ids(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; bytes that are not UTF-8 become replacement characters."""
        return str(self._backend.decode([int(token) for token in ids], skip_special_tokens=False))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write tokenizer.json and what transformers' AutoTokenizer needs beside it."""
        end = self._backend.id_to_token(self.end)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "clean_up_tokenization_spaces": False}
        write_json(Path(folder) / "tokenizer_config.json", config)
        write_text(Path(folder) / "tokenizer.json", self._json)


def cut(text: str) -> Iterator[str]:
    """Cut a text into pieces of about PIECE characters, before a new line where words end anyway.

    >>> len(list(cut("some words\\n" * 100_000)))
    17
    """
    # Only between two lines with ink: a tokenizer may treat a run of white space as one word.
    piece, start = re.compile(rf"(?s).{{{PIECE},}}?\S(?=\n\S)"), 0
    while found := piece.match(text, start):
        yield found[0]
        start = found.end()
    yield text[start:]


def grouped(texts: Iterable[tuple[Key, str]], size: int) -> Iterator[list[tuple[Key, str]]]:
    """Collect keyed texts until they have so many characters.

    >>> list(grouped([(0, "ab"), (1, "c"), (2, "d")], 3))
    [[(0, 'ab'), (1, 'c')], [(2, 'd')]]
    """
    group, left = list[tuple[Key, str]](), size
    for key, text in texts:
        group.append((key, text))
        left -= len(text)
        if left <= 0:
            yield group
            group, left = [], size
    if group:
        yield group


def train_bpe(texts: Iterable[str], vocab_size: int, out_path: str | os.PathLike[str] | None = None) -> TextTokenizer:
    """Train a byte-level BPE; the end token has id 0. Small texts may give fewer tokens than asked for.

    Every digit is a token of its own, as in LLaMA: a model then copies numbers digit by digit.

    `texts` should hold no held-out documents. A vocabulary of 257 is bytes without merges. Save it in the folder
    `out_path`, if given.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    require(
        BYTES_VOCABULARY <= vocab_size <= LARGEST,
        f"vocab_size must be ≥ {BYTES_VOCABULARY} (every byte and the end token) and ≤ {LARGEST}, got {vocab_size}; "
        "try 8192",
    )
    backend = _bytes_backend()
    if vocab_size > BYTES_VOCABULARY:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        backend.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        )
        # The trainer collects 256 texts at a time: pieces, so that 256 whole books never lie in memory.
        backend.train_from_iterator((piece for text in texts for piece in cut(text)), trainer)
    tokenizer = TextTokenizer(backend, 0)
    if out_path is not None:
        tokenizer.save(out_path)
    return tokenizer


def _bytes_backend() -> "Tokenizer":
    """Make the tokenizer that gives byte b the id b + 1."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # GPT-2's printable character for each byte.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    vocabulary = {END: 0} | {letters[byte]: byte + 1 for byte in range(256)}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return backend


def load_tokenizer(name_or_path: str | os.PathLike[str]) -> TextTokenizer:
    """Load "bytes", a tokenizer.json or a folder that has one, else OWNER/NAME from the Hugging Face hub.

    A name without an owner is looked for among downloaded tokenizers only: the hub is not asked for a mistyped folder.
    """
    from tokenizers import Tokenizer

    name = os.fspath(name_or_path)
    if name == "bytes":
        return TextTokenizer(_bytes_backend(), 0)
    file = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    if not file.is_file():
        file = _from_hub(name)
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"tokenizer must be a tokenizer.json, got {str(file)!r} ({error}); save it again") from error
    config = file.with_name("tokenizer_config.json")
    named = read_settings(config, "tokenizer").get("eos_token") if config.is_file() else None
    named = named.get("content") if isinstance(named, dict) else named
    ends = [backend.token_to_id(str(token)) for token in ((named,) if named else USUAL_ENDS)]
    found = [token for token in ends if token is not None]
    require(
        bool(found),
        f"tokenizer must have an end-of-text token, got {str(file)!r} without {named or ' or '.join(USUAL_ENDS)}; "
        "name it as eos_token in tokenizer_config.json",
    )
    return TextTokenizer(backend, found[0])


def _from_hub(name: str) -> Path:
    """Return the tokenizer.json of a model of the hub."""
    from huggingface_hub import snapshot_download

    try:
        require(not name.endswith(".json") and not Path(name).exists(), "no such file")
        files, offline = ["tokenizer.json", "tokenizer_config.json"], name.count("/") != 1
        file = Path(snapshot_download(name, allow_patterns=files, local_files_only=offline), "tokenizer.json")
        require(file.is_file(), "it has no tokenizer.json")
        return file
    except (OSError, ValueError) as error:
        raise ValueError(
            "tokenizer must be 'bytes', a tokenizer.json, a folder with one, or OWNER/NAME on the Hugging Face hub, "
            f"got {name!r} ({str(error).splitlines()[0]}); check the name and the network"
        ) from error
