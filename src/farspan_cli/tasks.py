"""`farspan tasks-path` and `farspan launch-path`: where other programs find files of this package."""

from importlib.util import find_spec
from pathlib import Path

from farspan_cli.app import app


@app.command("tasks-path")
def tasks_path() -> None:
    """Print the folder of our lm-eval tasks: farspan_passkey and farspan_perplexity.

    Example: `lm_eval --include_path "$(farspan tasks-path)" --tasks farspan_passkey --model hf --model_args …`
    """
    print(_package() / "lm_eval_tasks")


@app.command("launch-path")
def launch_path() -> None:
    """Print the folder of configurations for Accelerate: one-node.yaml, several-nodes.yaml and fsdp2.yaml.

    Example: `accelerate launch --config_file "$(farspan launch-path)/fsdp2.yaml" -m farspan_cli train CONFIG.toml …`
    """
    print(_package() / "launch")


def _package() -> Path:
    spec = find_spec("farspan")  # not imported: that would load torch to print a path
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
