"""The 33M model alone on a device: training steps by length, and decoding after a long context, linear beside softmax.

speed.py train|decode|warm --out FILE [--toy]. Training is timed as `farspan bench model` does (`farspan.benchmark.model`), with its
check of loss and gradients against float32; decoding with a check of its logits against the whole text read in float32.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

from farspan.benchmark.agree import ResultsDifferError
from farspan.benchmark.clock import captured, quantiles
from farspan.benchmark.decode import prefill, read
from farspan.benchmark.measure import in_turn, measure
from farspan.benchmark.model import Step, check_step
from farspan.benchmark.truth import as_timed, wider
from farspan.models import FarspanCache, FarspanConfig, FarspanForCausalLM
from farspan.results import write_result
from farspan.training.optimizer import compile_blocks

parser = argparse.ArgumentParser()
parser.add_argument("stage", choices=("train", "decode", "warm"))
parser.add_argument("--out", required=True)
parser.add_argument("--toy", action="store_true")
given = parser.parse_args()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PRESET = "tiny" if given.toy else "33m"
TOKENS = 1024 if given.toy else 65_536
LENGTHS = (64, 256, 1024) if given.toy else (512, 8192, 65_536)
CONTEXT = 512 if given.toy else 32_768
REPEATS = 3 if given.toy else 10
PLAIN = {"kind": "cosformer", "rotary": False}
ATTENTIONS = {"rope": "rope", "cosformer": "cosformer", "cosformer-plain": PLAIN}
BEGAN = time.time()
rows = []


def keep(row):
    """Write what there is after each row: a run that is cut leaves it."""
    rows.append(row)
    write_result(given.out + ".part", rows, device=DEVICE, seed=0)
    print(f"{time.time() - BEGAN:6.1f}", {key: value for key, value in row.items() if key != "seconds"}, flush=True)


def reason(error):
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def train():
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    for length in LENGTHS:
        torch.compiler.reset()  # blocks compiled for other lengths would make this one dynamic
        count, steps, figures = TOKENS // length, {}, {}
        for name, attention in ATTENTIONS.items():
            label = {"kind": "training", "preset": PRESET, "attention": name, "rows": count, "length": length, "compile": not given.toy}
            try:
                torch.manual_seed(0)
                config = FarspanConfig.preset(PRESET, attention=attention, train_length=length)
                model = FarspanForCausalLM(config).train().to(DEVICE)
                if not given.toy:
                    compile_blocks(model)
                ids = torch.randint(0, config.vocab_size, (count, length + 1), device=DEVICE)
                step, began = Step(model, ids, DEVICE), time.time()
                step()  # compiles, and makes the moments
                print(f"{time.time() - BEGAN:6.1f} {name}, {length}: first step {time.time() - began:.1f} s", flush=True)
                if given.stage == "warm":
                    del model, step
                    continue
                figures[name] = label | {"parameters": model.num_parameters(), "peak_bytes": measure(step, repeats=0, device=DEVICE).peak_bytes}
                try:
                    figures[name] |= check_step(name, step, dtype)
                except ResultsDifferError as error:  # timed all the same, and said so: for a reader to judge
                    figures[name]["refused"] = reason(error)
                    step.optimizer.zero_grad()
                steps[name] = step
            except (RuntimeError, ValueError, ResultsDifferError, torch.OutOfMemoryError) as error:
                steps.pop(name, None)
                print("FAILED", name, length, reason(error), flush=True)
                if given.stage != "warm":
                    keep({**label, "kind": "missing", "why": reason(error)})
        if not steps:
            continue
        seconds = in_turn(steps, repeats=REPEATS, device=DEVICE)
        first = next(iter(steps))
        for name, found in seconds.items():
            ratio = quantiles([ours / theirs for ours, theirs in zip(found, seconds[first], strict=True)])
            speed = {"seconds": found, "tokens_per_second": count * length / statistics.median(found)}
            speed |= {f"time_over_{first}": ratio.median, f"range_over_{first}": {"low": ratio.low, "high": ratio.high}}
            keep({**figures[name], **speed})
        steps.clear()


class Decoding:
    """A model after a prompt, one greedy token at a time for each text."""

    def __init__(self, model, ids, slots):
        self.model, self.cache = model, FarspanCache(model.config, max_length=slots)
        with torch.no_grad():
            for piece in ids.split(8192 if DEVICE == "cuda" else 128, dim=1):
                logits = model(piece, past_key_values=self.cache, logits_to_keep=1).logits[:, -1]
        self.logits, self.token = logits.clone(), logits.argmax(-1, keepdim=True).clone()
        self.bytes, self.run = self.cache.nbytes, self.step

    @torch.no_grad()
    def step(self):
        self.logits.copy_(self.model(self.token, past_key_values=self.cache).logits[:, -1])
        self.token.copy_(self.logits.argmax(-1, keepdim=True))

    def several(self):
        for _ in range(8):
            self.run()


def decode():
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    options = {name: {"attention": attention} for name, attention in ATTENTIONS.items()}
    far = {"cosformer_max_length": 4 * CONTEXT}  # "raise" must hold context and what is decoded after it
    options["cosformer"] |= far
    options["cosformer-decoupled"] = {"attention": "cosformer", "cosformer_beyond": "decoupled"} | far
    models = {}
    for name, fields in options.items():
        torch.manual_seed(0)
        models[name] = FarspanForCausalLM(FarspanConfig.preset(PRESET, **fields)).eval().to(DEVICE, dtype)
    generator = torch.Generator().manual_seed(0)
    vocabulary = models["rope"].config.vocab_size
    texts = {batch: torch.randint(0, vocabulary, (batch, CONTEXT), generator=generator).to(DEVICE) for batch in (1, 8)}
    for mode in ("eager", "graph"):  # what may break the device's state comes last
        if mode == "graph":
            read_prompts({name: model for name, model in models.items() if name != "cosformer-decoupled"})
        for batch, ids in texts.items():
            label = {"kind": "decode", "preset": PRESET, "mode": mode, "context": CONTEXT, "batch": batch}
            decoders, figures = {}, {}
            for name, model in models.items():
                if mode == "graph" and name == "cosformer":
                    why = "beyond='raise' reads positions on the host, which no CUDA graph can hold"
                    keep({**label, "kind": "missing", "attention": name, "why": why})
                    continue
                try:
                    room = 8 * (REPEATS + 3) + 32
                    decoder = Decoding(model, ids, None if mode == "eager" else CONTEXT + room)
                    tokens = []
                    if mode == "graph":
                        tokens.append(decoder.token.clone())
                        step = decoder.step
                        decoder.step()  # once by its calls: what is made lazily is there, and no address changes
                        tokens.append(decoder.token.clone())
                        decoder.run = captured(step) if DEVICE == "cuda" else ran(step)  # runs the call once, then records it
                    for _ in range(3):
                        tokens.append(decoder.token.clone())
                        decoder.run()
                    text = torch.cat([ids[:1], *(token[:1] for token in tokens)], dim=1)
                    checked = as_timed(f"{name}, {mode}", decoder.logits[:1], read(wider(model), text))
                    if mode == "eager":
                        peak = measure(decoder.step, repeats=0, device=DEVICE).peak_bytes
                        checked["peak_bytes_of_a_step"] = peak
                    figures[name] = {"cache_bytes": decoder.bytes, "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters())} | checked
                    decoders[name] = decoder
                except (RuntimeError, ValueError, ResultsDifferError, torch.OutOfMemoryError) as error:
                    keep({**label, "kind": "missing", "attention": name, "why": reason(error)})
            if not decoders:
                continue
            calls = {name: decoder.several for name, decoder in decoders.items()}
            for call in calls.values():
                call()
            seconds = in_turn(calls, repeats=REPEATS, device=DEVICE)
            first = next(iter(calls))
            for name, found in seconds.items():
                times = quantiles([x / 8 for x in found], mode == "graph")
                faster = quantiles([theirs / ours for ours, theirs in zip(found, seconds[first], strict=True)])
                row = {"milliseconds_a_step": times.milliseconds, "tokens_per_second": batch / times.median, f"speed_over_{first}": faster.spread}
                keep({**label, "attention": name, **row, **figures[name]})
            del decoders, calls
            if DEVICE == "cuda":
                torch.cuda.empty_cache()


def read_prompts(models):
    try:
        for row in prefill(models, CONTEXT, device=DEVICE, repeats=3):
            keep(row)
    except (RuntimeError, ValueError, ResultsDifferError, torch.OutOfMemoryError) as error:
        keep({"kind": "missing", "mode": "prefill", "why": reason(error)})


def ran(step):
    """A CPU's stand-in for a graph."""
    step()
    return step


if given.stage == "decode":
    decode()
else:
    train()
if given.stage == "warm":
    Path(given.out).touch()
    sys.exit()
write_result(given.out, rows, device=DEVICE, seed=0)
Path(given.out + ".part").unlink(missing_ok=True)
