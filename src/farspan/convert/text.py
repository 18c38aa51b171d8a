"""Text from any checkpoint that can be read, piece by piece."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer, TextIteratorStreamer

from farspan.convert.load import load
from farspan.convert.sources import Source, check_tokenizer, open_source
from farspan.errors import require
from farspan.modeling_farspan import FarspanForCausalLM

if TYPE_CHECKING:
    from farspan.data import TextTokenizer


def stream(
    path: str | os.PathLike[str],
    prompt: str,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    chat: bool = False,
) -> Iterator[str]:
    """Pieces of the continuation of a prompt, each as soon as its word is complete.

    path: a farspan folder, or anything :func:`from_pretrained` reads, with its tokenizer.
    temperature: 0 takes the likeliest token; above it the model's own top_p and top_k hold too. chat: put the prompt
    into the model's chat template.
    """
    source = open_source(Path(path))
    tokenizer = tokenizer_of(source)
    ids = _ids(tokenizer, prompt, chat)
    require(ids.shape[1] > 0, "prompt must have at least one token, got an empty text; write a word")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(source, device=device)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature > 0:
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": temperature}
    failure: list[BaseException] = []

    def work() -> None:
        try:
            model.generate(  # type: ignore[misc]
                ids.to(device),
                attention_mask=torch.ones_like(ids).to(device),
                max_new_tokens=max_new_tokens,
                pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
                eos_token_id=_ends(model, tokenizer),
                streamer=streamer,
                **sampling,
            )
        except BaseException as error:  # must reach the reader, who would wait for ever
            failure.append(error)
            streamer.end()

    thread = Thread(target=work, daemon=True)
    thread.start()
    yield from streamer
    thread.join()
    if failure:
        raise failure[0]


def _ends(model: FarspanForCausalLM, tokenizer: Any) -> list[int] | None:
    """Every token that ends a text: those of the model's generation settings, and the tokenizer's."""
    known = model.generation_config.eos_token_id
    ends = {*(known if isinstance(known, list) else [known]), tokenizer.eos_token_id} - {None}
    return sorted(ends) or None


def tokenizer_of(source: Source) -> Any:
    """The tokenizer that belongs to a source."""
    with TemporaryDirectory() as folder:
        source.carry(Path(folder))
        require(
            any(Path(folder).glob("*token*")) or (Path(folder) / "vocab.json").is_file(),
            f"{str(source.path)!r} must come with its tokenizer, got none; add tokenizer.json",
        )
        return AutoTokenizer.from_pretrained(folder)


def text_tokenizer(path: str | os.PathLike[str]) -> "TextTokenizer":
    """The tokenizer beside a model, or inside its GGUF file, as farspan.data knows tokenizers."""
    from farspan.data import load_tokenizer

    place = Path(path)
    if (place / "tokenizer.json").is_file():
        check_tokenizer(place)
        return load_tokenizer(place)
    with TemporaryDirectory() as folder:
        open_source(place).carry(Path(folder))
        require(
            (Path(folder) / "tokenizer.json").is_file(),
            f"MODEL must come with tokenizer.json, got {str(path)!r} without; add it to the folder",
        )
        return load_tokenizer(folder)


def calibration_windows(source: Source, text: Sequence[str], tokens: int, length: int) -> torch.Tensor:
    """Ids (windows, length) from text sources: an eighth from each document, more only where there are few."""
    from farspan.data import documents

    tokenizer, wanted = tokenizer_of(source), max(2, tokens // length)
    share, found, spare = max(1, wanted // 8), list[torch.Tensor](), list[torch.Tensor]()
    for name in text:
        for document in documents(name):
            if len(found) >= wanted:
                break
            text_part = document.text[: wanted * length * 10]  # few tokens are longer than ten characters
            ids = torch.tensor(tokenizer(text_part, verbose=False).input_ids)
            windows = list(ids[: len(ids) // length * length].view(-1, length))
            found += windows[:share]
            spare += windows[share : share + wanted - len(spare)]
    found += spare
    require(
        len(found) >= 2,
        f"calibration text must give at least two windows of {length} tokens, got {len(found)} from {', '.join(text)}; "
        "use longer texts",
    )
    return torch.stack(found[:wanted])


def _ids(tokenizer: Any, prompt: str, chat: bool) -> torch.Tensor:
    if not chat:
        return tokenizer(prompt, return_tensors="pt").input_ids
    require(
        tokenizer.chat_template is not None, "chat needs a tokenizer with a chat template, got one without; leave it"
    )
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).input_ids
