"""`farspan demo` and `farspan doctor`, the first two commands of a new user; and where files of this package are."""

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from farspan_cli.app import Json, app, show_table
from farspan_cli.experiments import reproduce

if TYPE_CHECKING:
    from torch import Tensor


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder of the run; the same command continues there.")] = Path("runs/demo"),
) -> None:
    """Train small models on this computer, and show what each does past its training length.

    The same as `farspan reproduce --preset cpu`: minutes on two cores, offline.

    Example: `farspan demo`
    """
    reproduce(out=out, preset="cpu")
    print("Trained on sequences of 64 bytes, and read at longer ones. Lower is better.")


PACKAGES = (
    *("farspan", "torch", "transformers", "accelerate", "tokenizers", "pyarrow", "gguf", "wonderwords", "scipy"),
    *("matplotlib", "jinja2", "triton", "flash-attn", "vllm"),
)


@app.command()
def doctor(json: Json = False) -> None:
    """Print versions, the device, and which implementation of each op runs here and why not the others.

    Example: `farspan doctor`
    """
    import platform

    import torch

    from farspan.results import device_name, version

    device = "cuda" if torch.cuda.is_available() else "cpu"
    versions = {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    calls = []
    for label, chosen in choices(device):
        steps, reasons = list[str](), dict[str, str]()
        while chosen is not None:
            steps.append(chosen.name)
            reasons |= chosen.skipped
            chosen = chosen.then
        calls.append((label, steps, reasons))
    if json:
        told = [{"call": label, "runs": steps, "skipped": reasons} for label, steps, reasons in calls]
        print(json_module.dumps({"versions": versions, "device": device_name(device), "calls": told}))
        return
    lines = [(a, " → ".join(b), "\n".join(f"{name}: {why}" for name, why in c.items())) for a, b, c in calls]
    console = Console()
    console.print(", ".join(f"{name} {found}" for name, found in versions.items() if found), highlight=False)
    console.print(f"not installed: {', '.join(name for name, found in versions.items() if not found)}", highlight=False)
    console.print(f"device: {device_name(device)}", highlight=False)
    show_table(console, ("call", "runs on", "because others do not"), lines)


def choices(device: str) -> list[tuple[str, Any]]:
    """Return what :func:`farspan.ops.explain` says of typical calls on a device."""
    import torch

    from farspan.ops import Rotary, coca_attention, cosformer_attention, explain, pope_attention, rope_attention

    dtype, rotary = torch.bfloat16 if device == "cuda" else torch.float32, Rotary(64)

    def tensors(queries: int, width: int) -> "list[Tensor]":
        shapes = (queries, 64), (512, width), (512, 64)
        return [torch.rand(1, 4, *shape, dtype=dtype, device=device) for shape in shapes]

    return [
        ("RoPE, training", explain(rope_attention, *tensors(512, 64), rotary=rotary)),
        ("RoPE, window 128", explain(rope_attention, *tensors(512, 64), rotary=rotary, window=128)),
        ("CoCA, training", explain(coca_attention, *tensors(512, 32), rotary=rotary)),
        ("CoCA, decoding", explain(coca_attention, *tensors(1, 32), rotary=rotary)),
        ("PoPE, window 128", explain(pope_attention, *tensors(512, 64), rotary=Rotary(128), window=128)),
        ("cosFormer", explain(cosformer_attention, *tensors(512, 64), max_length=512)),
    ]


PACKAGE = Path(__file__).resolve().parents[1] / "farspan"
"""Not imported: that would load torch to print a path."""


@app.command("tasks-path")
def tasks_path() -> None:
    """Print the folder of our lm-eval tasks: farspan_passkey and farspan_perplexity.

    Example: `lm_eval --include_path "$(farspan tasks-path)" --tasks farspan_passkey --model hf --model_args …`
    """
    print(PACKAGE / "lm_eval_tasks")


@app.command("launch-path")
def launch_path() -> None:
    """Print the folder of configurations for Accelerate: one-node.yaml, several-nodes.yaml and fsdp2.yaml.

    Example: `accelerate launch --config_file "$(farspan launch-path)/fsdp2.yaml" -m farspan_cli train CONFIG.toml …`
    """
    print(PACKAGE / "launch")
