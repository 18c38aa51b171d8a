"""`farspan demo` and `farspan doctor`: the first two commands of a new user."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from farspan_cli.app import app
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
    print("Each model was trained on sequences of 64 bytes and reads longer ones here. Lower is better.")


@app.command()
def doctor() -> None:
    """Print versions, the device, and which implementation of each op runs here and why not the others.

    Example: `farspan doctor`
    """
    import platform

    import torch

    from farspan.results import device_name, version

    console, device = Console(), "cuda" if torch.cuda.is_available() else "cpu"
    names = ("farspan", "torch", "transformers", "accelerate", "triton", "flash-attn", "vllm")
    versions = {"python": platform.python_version()} | {name: version(name) for name in names}
    console.print(", ".join(f"{name} {found}" for name, found in versions.items() if found), highlight=False)
    console.print(f"device: {device_name(device)}", highlight=False)
    missing = [name for name, need in EXTRAS.items() if any(version(package) is None for package in need)]
    console.print(f"extras not installed: {', '.join(missing) or 'none'}", highlight=False)
    table = Table("call", "runs on", "because others do not", expand=False)
    for label, chosen in choices(device):
        steps, reasons = [], []
        while chosen is not None:
            steps.append(chosen.name)
            reasons += [f"{name}: {why}" for name, why in chosen.skipped.items()]
            chosen = chosen.then
        table.add_row(label, " → ".join(steps), "\n".join(reasons))
    console.print(table)


EXTRAS = {
    "data": ("numpy", "tokenizers", "zstandard", "pyarrow"),
    "train": ("accelerate", "safetensors", "tensorboard"),
    "eval": ("wonderwords", "scipy"),
    "report": ("matplotlib", "jinja2"),
    "gguf": ("gguf",),
    "lora": ("peft",),
    "gpu": ("triton",),
}


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
