"""`farspan tasks-path` and `farspan launch-path`: where other programs find files of this package."""

from pathlib import Path

from farspan_cli.app import app

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
