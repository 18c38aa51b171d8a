"""A converted checkpoint against transformers' own LLaMA: weights, logits and greedy text, JSON with provenance.

Example: ``python benchmarks/llama_parity.py SmolLM2-135M-Instruct.Q4_1.gguf --text valid.jsonl.xz --out parity.json``

The witness reads the source itself, by transformers' own reader of folders or of GGUF files. transformers takes norms
and angles in float32 whatever the model's dtype, so at logits near 40 its own two attention paths differ by 1e-4. To
see whether two models are the same function, those two are put into float64 as well; and each float32 model is measured
against the float64 one, which says whose rounding a difference is.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from farspan.benchmark.record import parse_script
from farspan.convert import from_pretrained
from farspan.data import documents
from farspan.results import write_result


@contextmanager
def wide_llama(theta: float) -> Iterator[None]:
    """LLaMA's norms and angles in the dtype of the model, for plain RoPE."""
    norm, rotary = modeling_llama.LlamaRMSNorm, modeling_llama.LlamaRotaryEmbedding
    narrow = norm.forward, rotary.forward

    def wide_norm(self: modeling_llama.LlamaRMSNorm, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def wide_rotary(
        self: modeling_llama.LlamaRotaryEmbedding, x: Tensor, position_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        width = 2 * self.inv_freq.shape[0]
        step = theta ** -(torch.arange(0, width, 2, dtype=x.dtype) / width)
        angles = (position_ids[..., None].to(x.dtype) * step).repeat(1, 1, 2)
        return angles.cos(), angles.sin()

    norm.forward, rotary.forward = wide_norm, wide_rotary
    try:
        yield
    finally:
        norm.forward, rotary.forward = narrow


class Witness:
    """What transformers, without farspan, makes of a source."""

    def __init__(self, source: Path) -> None:
        self._place, self._file = (source.parent, source.name) if source.suffix == ".gguf" else (source, None)
        self.reader = "transformers' GGUF reader" if self._file else "transformers' safetensors reader"

    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self._place, **self._options(unpack=False))

    def model(self, attention: str) -> LlamaForCausalLM:
        options = {"dtype": torch.float32, "attn_implementation": attention, **self._options(unpack=True)}
        return AutoModelForCausalLM.from_pretrained(self._place, **options).eval()

    def _options(self, *, unpack: bool) -> dict[str, Any]:
        if self._file is None:
            return {}
        packed = {"quantization_config": GgufConfig(dequantize=True)} if unpack else {}
        return {"gguf_file": self._file, **packed}


@torch.no_grad()
def compare(source: Path, text: str, length: int, new_tokens: int) -> list[dict[str, object]]:
    """Weights, then largest differences of logits over `length` tokens for each arithmetic, then the greedy text."""
    witness = Witness(source)
    ids = torch.tensor([witness.tokenizer().encode(text)[:length]])
    ours, theirs = from_pretrained(source, "rope", dtype=torch.float32).eval(), witness.model("sdpa")
    held = dict(ours.named_parameters())
    different = [name for name, p in theirs.named_parameters() if not torch.equal(held.pop(name), p)]
    rows: list[dict[str, object]] = [
        {"kind": "weights", "witness": witness.reader, "different": different, "ours_alone": list(held)}
    ]
    texts = [model.generate(ids[:, :16], max_new_tokens=new_tokens, do_sample=False) for model in (ours, theirs)]
    narrow = {"ours": ours(ids).logits, "theirs on SDPA": theirs(ids).logits}
    narrow["theirs eager"] = witness.model("eager")(ids).logits
    with wide_llama(theirs.config.rope_parameters["rope_theta"]):
        wide = theirs.double()(ids).logits
        rows.append(_row("float64, norms and angles too", "ours", "theirs on SDPA", ours.double()(ids).logits, wide))
    for name in ("ours", "theirs eager"):
        rows.append(_row("float32", name, "theirs on SDPA", narrow[name], narrow["theirs on SDPA"]))
    for name, logits in narrow.items():
        rows.append(_row("float32", name, "theirs in float64", logits, wide))
    same = bool(torch.equal(*texts))
    return [*rows, {"kind": "greedy", "prompt": 16, "new_tokens": new_tokens, "same": same}]


def _row(arithmetic: str, one: str, other: str, a: Tensor, b: Tensor) -> dict[str, object]:
    row = {"kind": "logits", "arithmetic": arithmetic, "of": one, "against": other, "tokens": a.shape[1]}
    return row | {"largest": b.abs().max().item(), "largest_difference": (a - b).abs().max().item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a LLaMA checkpoint: folder or GGUF file")
    parser.add_argument("--text", required=True, help="a text to read, as farspan data takes it")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=100)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parse_script(parser)
    text = next(documents(arguments.text)).text
    rows = compare(arguments.source, text, arguments.length, arguments.new_tokens)
    for row in rows:
        print(row)
    if arguments.out is not None:
        write_result(arguments.out, rows, device="cpu", seed=0)


if __name__ == "__main__":
    main()
