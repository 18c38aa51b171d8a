"""Hostile command lines and op calls: ``python -m tests.fuzz --commands 5000 --ops 20000 --seed 0``.

Each command line starts from one that works in a small folder of real files, and is then damaged: values of options,
missing arguments, broken input files. Each op call has random shapes, dtypes and options, many of them impossible.

What a command may do: succeed with finite numbers; or exit with 2, one line, and nothing left behind.
"""

import argparse
import json
import math
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from safetensors import safe_open
from torch import Tensor

from farspan import FarspanConfig, FarspanForCausalLM
from farspan.data import load_tokenizer, prepare
from farspan.ops import (
    DynamicNTK,
    Rotary,
    alibi_attention,
    coca_attention,
    cosformer_attention,
    pope_attention,
    rope_attention,
)
from farspan_cli import app as application
from tests.processes import Started

SECONDS = 30.0
"""Longest run of one command. A hostile number may ask for honest long work; that is no failure."""
MEMORY = 12 * 2**30
"""Address space of one command."""

# Command lines


@dataclass(frozen=True)
class Outcome:
    """What one command line did, and what is wrong with that (None if nothing)."""

    arguments: list[str]
    damage: str
    status: int
    fault: str | None
    stderr: str

    def __str__(self) -> str:
        return (
            f"farspan {' '.join(self.arguments)}   [{self.damage}]\n  {self.fault} (exit {self.status})\n{self.stderr}"
        )


def make_inputs(folder: Path) -> None:
    """Write a text, tokens, a model, a LLaMA checkpoint, pairs, results and settings: inputs of every command."""
    from transformers import LlamaConfig, LlamaForCausalLM

    text = "".join(f"{i} times {i} is {i * i}, and that is that.\n" for i in range(300))
    (folder / "text.txt").write_text(text)
    (folder / "text.jsonl").write_text(json.dumps({"text": text}) + "\n")
    pair = {"good": "two and two are four", "bad": "two and two is four"}
    (folder / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    prepare([str(folder / "text.txt")], str(folder / "tokens"), tokenizer="bytes", valid_share=0.0)
    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    torch.manual_seed(0)
    FarspanForCausalLM(FarspanConfig.preset("tiny", attention="coca-exact", **small)).save_pretrained(folder / "model")
    tokenizer = load_tokenizer("bytes")
    tokenizer.save(folder / "model")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    described = json.loads((folder / "model" / "tokenizer_config.json").read_text())
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(described | {"chat_template": template}))
    layers = {"num_hidden_layers": 2, "global_every": 2, "log_length": False}
    plain = FarspanConfig.preset("tiny", attention="hybrid-rope", **(small | layers))
    FarspanForCausalLM(plain).save_pretrained(folder / "hybrid")
    tokenizer.save(folder / "hybrid")
    llama = LlamaConfig(
        vocab_size=512, max_position_embeddings=64, num_key_value_heads=2, **(small | {"num_hidden_layers": 2})
    )
    LlamaForCausalLM(llama).save_pretrained(folder / "llama")
    tokenizer.save(folder / "llama")
    (folder / "config.toml").write_text(
        'model = { preset = "tiny", options = { num_hidden_layers = 1, hidden_size = 32, intermediate_size = 48 } }\n'
        'data = { sources = { "tokens" = 1.0 }, length = 16, batch_size = 4 }\n'
        "optimizer = { steps = 2, peak_lr = 1e-3, accumulation = 1 }\n"
    )
    (folder / "recipe.toml").write_text(
        '[[stages]]\nname = "one"\nlength = 16\nbatch_size = 2\nobjective = { next-token = 1.0 }\n'
        "optimizer = { steps = 2, peak_lr = 1e-3, accumulation = 1 }\n"
    )
    (folder / "tiny.toml").write_text(
        'models = { rope = {} }\ncorpus = { train = { "text.jsonl" = 1.0 }, held_out = ["text.jsonl"] }\n'
        'evaluation = { scalings = ["none"], perplexity_lengths = [16], stride = 16, texts = 1, text_tokens = 64 }\n'
        '[training]\nmodel = { preset = "tiny", options = { num_hidden_layers = 1 } }\n'
        "data = { length = 16, batch_size = 4 }\noptimizer = { steps = 2, accumulation = 1 }\n"
    )
    row: dict[str, Any] = {
        "variant": "rope",
        "seed": 0,
        "scaling": "none",
        "length": 64,
        "stride": 32,
        "mode": "sliding",
    }
    row |= {"nll": 100.0, "tokens": 50, "texts": 1, "ppl": 7.389}
    head = {"schema": 1, "command": "farspan eval ppl", "commit": None, "versions": {}, "device": "CPU", "seed": 0}
    (folder / "results" / "results").mkdir(parents=True)
    (folder / "results" / "results" / "ppl-rope-0.json").write_text(json.dumps(head | {"rows": [row]}))


COMMANDS = [
    "data text.txt --out out --tokenizer bytes",
    "data text.jsonl --out out --train-tokenizer 300",
    "train config.toml --out out",
    "convert llama --attention coca-exact --out out",
    "convert llama --attention hybrid-rope --window 8 --global-every 2 --out out",
    "finetune model --data tokens --recipe recipe.toml --out out",
    "eval ppl model --text text.txt --lengths 32,64 --stride 32 --texts 1 --text-tokens 128 --out out.json",
    "eval passkey model --lengths 240 --cases 1 --out out.json",
    "eval positions model --text text.txt --texts 1 --text-tokens 256 --out out.json",
    "eval retrieval model --tasks abcdigits --lengths 256 --cases 1 --out out.json",
    "eval pairs model --pairs pairs.jsonl --out out.json",
    "eval bits model --text text.txt --out out.json",
    "export model --out out",
    "export hybrid --as smollm3 --out out",
    "report results --out out",
    "generate model zwei --max-new-tokens 2",
    "generate model zwei --chat --max-new-tokens 2 --temperature 0.5",
    "analyze model --text text.txt --texts 1 --text-tokens 256 --queries 8 --out out",
    "reproduce --preset tiny.toml --only ppl --out out",
    "bench attention --lengths 32 --window 8 --repeats 1 --out out.json",
    "bench cosformer --lengths 32 --published-length 64 --repeats 1 --out out.json",
    "doctor",
]
NUMBERS = ["0", "-1", "1", "nan", "inf", "-inf", "1e300", "1e-320", "99999999999999999999", "1,,2", "²", "0x10", "1_0"]
WORDS = [
    "",
    " ",
    "nosuch",
    "rope",
    "hybrid",
    "a=b=c",
    "=",
    "ntk-",
    "ntk-nan",
    "[",
    "{}",
    "é\u202e",
    "-",
    "--",
    "\\",
    "%s",
]
PATHS = ["missing", "/", ".", "..", "text.txt", "model", "tokens", "llama", "out/deeper/still", "/dev/null", "a" * 300]
JSON_VALUES: list[Any] = [
    None,
    -1,
    0,
    1e300,
    10**11,
    10**30,
    "x",
    "",
    [],
    {},
    [[[]]],
    True,
    math.nan,
    math.inf,
    {"a": [1]},
]
TOML_VALUES = ["-1", "0", "nan", "inf", "1e300", "10" * 15, '"x"', "[]", "{}", "true", "1979-05-27", "[[1]]", "0.5"]


def options_of(words: list[str]) -> list[str]:
    """Return the names of all options that a command has."""
    command: Any = typer.main.get_command(application.app)
    for word in words:
        if word not in getattr(command, "commands", {}):
            break
        command = command.commands[word]
    return [name for p in command.params for name in p.opts if name.startswith("--") and name != "--help"]


def hostile_command(draw: random.Random, folder: Path) -> tuple[list[str], str]:
    """Draw a command line, and damage it or one of its input files."""
    arguments = draw.choice(COMMANDS).split()
    damage = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        kind = draw.random()
        if kind < 0.45 and (names := options_of(arguments)):
            name, value = draw.choice(names), draw.choice(NUMBERS + WORDS + PATHS)
            if name in arguments:
                arguments[arguments.index(name) + 1 : arguments.index(name) + 2] = [value]
            else:
                arguments += [name] if draw.random() < 0.2 else [name, value]
            damage.append("option")
        elif kind < 0.55 and len(arguments) > 2:
            damage.append(f"without {arguments.pop(draw.randrange(1, len(arguments)))}")
        elif kind < 0.65 and len(arguments) > 1:
            at = draw.randrange(1, len(arguments))
            arguments[at] = draw.choice(NUMBERS + WORDS + PATHS)
            damage.append("argument")
        else:
            inputs = {x.split("=")[0] for x in arguments}
            files = [x for x in sorted(folder.rglob("*")) if x.is_file() and x.relative_to(folder).parts[0] in inputs]
            if files:
                file = draw.choice(files)
                damage.append(f"{file.relative_to(folder)}: {break_file(draw, file)}")
    return arguments, "; ".join(damage)


def break_file(draw: random.Random, file: Path) -> str:
    """Damage a file, and say how."""
    data = file.read_bytes()
    if file.suffix == ".json" and draw.random() < 0.7:
        try:
            values = json.loads(data)
            inner = draw.choice([values, *(x for x in values.values() if isinstance(x, dict) and x)])
            key = draw.choice([*inner, "sliding_window"])
            inner[key] = draw.choice(JSON_VALUES)
            file.write_text(json.dumps(values))
            return f"{key} = {inner[key]!r}"
        except (ValueError, AttributeError, IndexError, RecursionError):
            pass
    if file.suffix == ".toml" and draw.random() < 0.8:
        words = data.decode(errors="replace").split(" ")
        after = [i + 1 for i, word in enumerate(words[:-1]) if word.endswith("=")]
        if after:
            at, value = draw.choice(after), draw.choice(TOML_VALUES)
            words[at] = value + "," * words[at].endswith(",")
            file.write_text(" ".join(words))
            return f"{words[at - 2 : at + 1]}"
    kind = draw.choice(("empty", "truncated", "flipped", "nested", "removed", "random"))
    if kind == "removed":
        file.unlink()
    elif kind == "flipped":
        at = draw.randrange(max(1, len(data)))
        file.write_bytes(data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :] if data else b"")
    else:
        made = {"empty": b"", "truncated": data[: len(data) // 2], "nested": b"[" * 100_000}
        file.write_bytes(made.get(kind, draw.randbytes(200)))
    return kind


LIMITED = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))"


def run_command(arguments: list[str], damage: str, folder: Path) -> Outcome:
    """Run a command line in a process of its own, and judge what it did."""
    from tests.command_line import program

    before = snapshot(folder)
    with Started(program, LIMITED, *arguments, cwd=folder) as running:
        running.process.join(SECONDS)
        if running.process.is_alive():
            return Outcome(arguments, damage, -1, None, "still running")
        done = running.wait()
    printed = [line for line in done.stderr.splitlines() if line.strip()]
    fault = None
    if "Traceback" in done.stderr or "Traceback" in done.stdout:
        fault = "a traceback"
    elif done.returncode == 2 and not (printed and printed[-1].startswith("farspan: ")):
        fault = "exit 2 without a line of farspan"
    elif done.returncode == 2:
        new = sorted(snapshot(folder) ^ before)
        fault = f"left behind: {new[:3]}" if new and "step" not in printed[-1] else None
    elif done.returncode == 0:
        fault = not_finite(folder, before)
    elif not (done.returncode == 1 and arguments[0] == "reproduce"):
        fault = "an exit status other than 0 or 2"
    return Outcome(arguments, damage, done.returncode, fault, "\n".join(printed[-6:]))


def snapshot(folder: Path) -> set[tuple[str, int]]:
    """Return every file and folder with its size."""
    return {
        (str(x.relative_to(folder)), x.stat().st_size if x.is_file() else -1)
        for x in folder.rglob("*")
        if x.name != ".lock"
    }


def not_finite(folder: Path, before: set[tuple[str, int]]) -> str | None:
    """Return which new result or weight is not finite."""

    def wrong(text: str) -> Any:
        raise ArithmeticError(text)

    for name, _ in sorted(snapshot(folder) - before):
        file = folder / name
        try:
            if file.suffix == ".json":
                json.loads(file.read_text(), parse_constant=wrong)
            if file.suffix == ".safetensors":
                with safe_open(file, "pt") as tensors:
                    for key in tensors.keys():  # noqa: SIM118 (no mapping)
                        if not tensors.get_tensor(key).float().isfinite().all():
                            raise ArithmeticError(key)
        except ArithmeticError as error:
            return f"exit 0, but {name} holds {error}"
    return None


def fuzz_commands(cases: int, seed: int) -> Iterator[Outcome]:
    """Run hostile command lines."""
    draws = (random.Random(f"{seed}/{case}") for case in range(cases))
    yield from in_fresh_folders(lambda folder, draw=draw: hostile_command(draw, folder) for draw in draws)


def undamaged_commands() -> Iterator[Outcome]:
    """Run each command as it is; one that fails would hide what its damage does."""
    yield from in_fresh_folders(lambda _, line=line: (line.split(), "undamaged") for line in COMMANDS)


def in_fresh_folders(commands: Iterable[Callable[[Path], tuple[list[str], str]]]) -> Iterator[Outcome]:
    """Run command lines, each in a fresh copy of the inputs, which it may damage first."""
    with tempfile.TemporaryDirectory() as home:
        inputs, folder = Path(home) / "inputs", Path(home) / "case"
        inputs.mkdir()
        make_inputs(inputs)
        for command in commands:
            shutil.copytree(inputs, folder)
            yield run_command(*command(folder), folder)
            shutil.rmtree(folder)


# Calls of ops


def fuzz_ops(calls: int, seed: int) -> Iterator[str]:
    """Call ops with random arguments. Yield every call that ends in neither finite numbers nor one clear line."""
    for case in range(calls):
        draw = random.Random(f"{seed}/op/{case}")
        torch.manual_seed(case)
        op, arguments, options = hostile_call(draw)
        said = f"{op.__name__}({', '.join(str(tuple(x.shape)) for x in arguments)}, {options})"
        try:
            out = op(*arguments, **options)
            out = out[0] if isinstance(out, tuple) else out
        except (ValueError, TypeError, NotImplementedError) as error:
            if "\n" in str(error) or not str(error):
                yield f"{said}: error of several lines: {error}"
        except Exception as error:  # what a user would see as a traceback from inside
            yield f"{said}: {type(error).__name__}: {error}"
        else:
            if not out.isfinite().all():
                yield f"{said}: not finite"


def hostile_call(draw: random.Random) -> tuple[Any, list[Tensor], dict[str, Any]]:
    """Draw an op with arguments: sizes that mostly fit, options that mostly exist."""

    def odd(usual: Any, *others: Any) -> Any:
        return draw.choice(others) if draw.random() < 0.06 else usual

    op = draw.choice((coca_attention, rope_attention, alibi_attention, cosformer_attention, pope_attention))
    b, g, n, d = draw.choice((1, 2)), draw.choice((1, 2)), draw.choice((1, 3, 8)), draw.choice((2, 4, 8))
    h, m = g * draw.choice((1, 2)), n + draw.choice((0, 0, 5))
    width = {coca_attention: d // 2}.get(op, d)
    dtype = draw.choice((torch.float32, torch.float64, torch.float32, odd(torch.float32, torch.int64, torch.bool)))
    sizes = [(b, h, n, odd(d, 0, 3)), (b, odd(g, 3), odd(m, 0, 1), odd(width, 1, 7)), (b, g, m, odd(d, 1, 6))]
    arguments = [(torch.randn(size) * odd(1, 0, 100)).to(dtype) for size in sizes]
    if op in (coca_attention, pope_attention):
        arguments[1] = arguments[1].abs() if dtype.is_floating_point else arguments[1]
    options: dict[str, Any] = {}
    if op is not alibi_attention and op is not cosformer_attention:
        scaling = draw.choice((None, None, DynamicNTK(4.0, 4)))
        options["rotary"] = draw.choice((Rotary(d, scaling=scaling), None, odd(Rotary(d), Rotary(2 * d), "x", 3)))
    if op is cosformer_attention:
        options["max_length"] = draw.choice((16, 4, odd(16, 0, -1, "x")))
        options["beyond"] = draw.choice(("raise", "decay", odd("decay", "nosuch")))
    choices: dict[str, list[Any]] = {
        "causal": [True, False, odd(True, None, "x")],
        "window": [None, 1, 3, 100, odd(2, 0, -1, 1.5, "x")],
        "padding_mask": [torch.rand(b, m) < 0.7, torch.zeros(b, m, dtype=torch.bool), odd(None, torch.ones(b, m + 1))],
        "documents": [torch.randint(3, (b, m)).sort(-1).values, odd(None, torch.zeros(b), torch.rand(b, m))],
        "positions": [torch.arange(m).expand(b, m), odd(None, torch.arange(m).flip(0), torch.tensor([[math.nan]]))],
        "scale": [0.5, 0.0, -2.0, odd(1.0, math.nan, math.inf, "x")],
        "backend": ["auto", "reference", "sdpa", odd("auto", "nosuch", None)],
    }
    allowed = set(choices) - ({"window", "scale"} if op is cosformer_attention else set())
    for name in draw.sample(sorted(allowed), draw.choice((0, 1, 1, 2, 3))):
        options[name] = draw.choice(choices[name])
    return op, arguments, options


def main() -> None:
    """Run both attacks, print every fault, and exit with 1 if there was one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commands", type=int, default=5000)
    parser.add_argument("--ops", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    faults, statuses = 0, Counter[int]()
    for fault in fuzz_ops(given.ops, given.seed):
        faults += 1
        print(fault, flush=True)
    for done, outcome in enumerate(fuzz_commands(given.commands, given.seed), 1):
        statuses[outcome.status] += 1
        if outcome.fault:
            faults += 1
            print(outcome, flush=True)
        if done % 100 == 0:
            print(f"{done} command lines, exit statuses {dict(statuses)}, {faults} faults", file=sys.stderr, flush=True)
    print(f"{given.ops} op calls, {given.commands} command lines, exit statuses {dict(statuses)}: {faults} faults")
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
