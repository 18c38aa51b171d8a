"""Write text with any checkpoint that can be read."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer

from farspan.checkpoints.configuration import one_line
from farspan.checkpoints.convert import load
from farspan.checkpoints.sources import open_source, tokenizer_of
from farspan.errors import require

COLDEST, HOTTEST = 1e-3, 1e3


def generate(
    path: str | os.PathLike[str],
    prompt: str,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    chat: bool = False,
    show: Callable[[str], object] | None = None,
) -> str:
    """Return the continuation of a prompt.

    Args:
        path: a farspan folder, or anything :func:`farspan.convert.from_pretrained` reads, with its tokenizer.
        temperature: 0 takes the likeliest token; above it the model's own top_p and top_k hold too.
        chat: put the prompt into the model's chat template.
        show: called with each piece of the text as soon as its word is complete.
    """
    require(
        temperature == 0 or COLDEST <= temperature <= HOTTEST,
        f"temperature must be 0 or {COLDEST:g} … {HOTTEST:g}, got {temperature!r}; 0 takes the likeliest token",
    )
    source = open_source(Path(path))
    tokenizer = tokenizer_of(source)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids = torch.tensor([_ids(tokenizer, prompt, chat)], dtype=torch.long, device=device)
    require(ids.shape[1] > 0, "prompt must have at least one token, got an empty text; write a word")
    model, pieces = load(source, device=device), list[str]()

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            pieces.append(text)
            if show is not None:
                show(text)

    settings: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature > 0:
        torch.manual_seed(seed % 2**63)
        settings = {"do_sample": True, "temperature": temperature}
    pad, end, known = tokenizer.pad_token_id, tokenizer.eos_token_id, model.generation_config.eos_token_id
    settings |= {"pad_token_id": end if pad is None else pad, "max_new_tokens": max_new_tokens}
    streamer = Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    try:
        settings["eos_token_id"] = sorted({*(known if isinstance(known, list) else [known]), end} - {None}) or None
        model.generate(ids, attention_mask=torch.ones_like(ids), streamer=streamer, **settings)  # type: ignore[misc]
    except (TypeError, LookupError, AttributeError, ImportError) as error:  # of settings that nobody checked
        raise ValueError(f"generation_config.json of {path} has settings that fail ({one_line(error)})") from error
    return "".join(pieces)


def _ids(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    require(
        not chat or tokenizer.chat_template is not None,
        "--chat needs a tokenizer with a chat template, got one without; leave --chat out",
    )
    try:
        if not chat:
            return list(tokenizer(prompt).input_ids)
        messages = [{"role": "user", "content": prompt}]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    except Exception as error:  # a template is a program, and tokenizer_config.json may hold anything
        what = "chat template" if chat else "tokenizer"
        raise ValueError(f"the model's {what} fails ({one_line(error)}); correct it, or leave --chat out") from error
