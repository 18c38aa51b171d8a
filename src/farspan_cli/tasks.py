"""`farspan tasks-path`: where lm-eval finds our tasks."""

from importlib.util import find_spec
from pathlib import Path

from farspan_cli.app import app


@app.command("tasks-path")
def tasks_path() -> None:
    """Print the folder of our lm-eval tasks: farspan_passkey and farspan_perplexity.

    Example: `lm_eval --include_path "$(farspan tasks-path)" --tasks farspan_passkey --model hf --model_args …`
    """
    package = find_spec("farspan")  # not imported: that would load torch to print a path
    assert package is not None
    assert package.origin is not None
    print(Path(package.origin).parent / "lm_eval_tasks")
