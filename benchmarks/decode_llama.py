"""Time one decoded token of a tiny model on the CPU against transformers' LLaMA of the same shape, one thread, eager.

python benchmarks/decode_llama.py --out results/decode-llama-cpu.json
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from farspan import FarspanConfig, FarspanForCausalLM
from farspan.results import write_result

CONTEXT, TOKENS = 64, 60


def models() -> dict[str, torch.nn.Module]:
    """Make LLaMA and one model per attention, all of preset "tiny"."""
    torch.manual_seed(0)
    config = FarspanConfig.preset("tiny")
    shape = {name: getattr(config, name) for name in ("vocab_size", "hidden_size", "intermediate_size")}
    llama = LlamaConfig(
        **shape,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    found: dict[str, torch.nn.Module] = {"llama": LlamaForCausalLM(llama).eval()}
    for attention in ("rope", "coca-exact", "coca-slack"):
        found[attention] = FarspanForCausalLM(FarspanConfig.preset("tiny", attention=attention)).eval()
    return found


@torch.no_grad()
def seconds(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """Return the seconds per token after a prompt."""
    cache = model(ids, use_cache=True).past_key_values
    for _ in range(5):
        model(ids[:, :1], past_key_values=cache)
    began = time.perf_counter()
    for _ in range(TOKENS):
        model(ids[:, :1], past_key_values=cache)
    return (time.perf_counter() - began) / TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    given, ids = models(), torch.randint(0, 512, (1, CONTEXT))
    times: dict[str, list[float]] = {name: [] for name in given}
    for _ in range(arguments.repeats):  # in turn, so that a busy machine slows all of them
        for name, model in given.items():
            times[name].append(seconds(model, ids))
    rows = []
    for name, found in times.items():
        ratios = sorted(ours / theirs for ours, theirs in zip(found, times["llama"], strict=True))
        low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
        rows.append({"model": name, "ratio": statistics.median(ratios), "low": low, "high": high})
        print(f"{name:12} {rows[-1]['ratio']:.3f} × LLaMA ({low:.3f}–{high:.3f})")
    write_result(arguments.out, rows, device="cpu", seed=0)


if __name__ == "__main__":
    main()
