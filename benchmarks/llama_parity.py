"""A converted checkpoint against transformers' own LLaMA: logits and greedy text, JSON with provenance.

Example: ``python benchmarks/llama_parity.py SmolLM2-135M-Instruct.Q4_1.gguf --text valid.jsonl.xz --out parity.json``

transformers takes norms and angles in float32 whatever the model's dtype, so at logits near 40 its own two attention
paths differ by 1e-4. To see whether two models are the same function, those two are put into float64 as well.
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from farspan.convert import convert_folder, from_pretrained
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


@torch.no_grad()
def compare(source: Path, text: str, length: int, new_tokens: int) -> list[dict[str, object]]:
    """Largest differences of logits over `length` tokens, a row for each arithmetic, then the greedy text."""
    with tempfile.TemporaryDirectory() as folder:
        llama = Path(folder) / "llama"
        convert_folder(source, Path(folder) / "rope", "rope")
        convert_folder(Path(folder) / "rope", llama, to="llama")
        tokenizer = AutoTokenizer.from_pretrained(llama)
        ids = torch.tensor([tokenizer.encode(text)[:length]])

        def theirs(dtype: torch.dtype, path: str) -> LlamaForCausalLM:
            return LlamaForCausalLM.from_pretrained(llama, dtype=dtype, attn_implementation=path).eval()

        ours = from_pretrained(source, "rope", dtype=torch.float32).eval()
        sdpa = theirs(torch.float32, "sdpa")
        logits = ours(ids).logits
        rows = [_row("float32, theirs on SDPA", logits, sdpa(ids).logits)]
        rows.append(_row("float32, theirs on SDPA against theirs eager", theirs(torch.float32, "eager")(ids).logits,
                         sdpa(ids).logits))  # fmt: skip
        texts = [model.generate(ids[:, :16], max_new_tokens=new_tokens, do_sample=False) for model in (ours, sdpa)]
        wide = theirs(torch.float64, "sdpa")
        with wide_llama(wide.config.rope_parameters["rope_theta"]):
            rows.append(_row("float64, norms and angles too", ours.double()(ids).logits, wide(ids).logits))
        same = bool(torch.equal(*texts))
        return [*rows, {"kind": "greedy", "prompt": 16, "new_tokens": new_tokens, "same": same}]


def _row(arithmetic: str, a: Tensor, b: Tensor) -> dict[str, object]:
    row = {"kind": "logits", "arithmetic": arithmetic, "tokens": a.shape[1]}
    return row | {"largest": b.abs().max().item(), "largest_difference": (a - b).abs().max().item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a LLaMA checkpoint: folder or GGUF file")
    parser.add_argument("--text", required=True, help="a text to read, as farspan data takes it")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=100)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    text = next(documents(arguments.text)).text
    rows = compare(arguments.source, text, arguments.length, arguments.new_tokens)
    for row in rows:
        print(row)
    if arguments.out is not None:
        write_result(arguments.out, rows, device="cpu", seed=0)


if __name__ == "__main__":
    main()
