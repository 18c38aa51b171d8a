"""The house rules: imports run one way, and the lower rooms stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "farspan"
FLOORS = {
    "errors": 0,
    "utils": 0,
    "files": 0,
    "intervals": 0,
    "pool": 0,
    "results": 0,
    "experiments": 0,
    "data": 1,
    "ops": 1,
    "cache": 2,
    "layers": 2,
    "configuration_farspan": 3,
    "modeling_farspan": 3,
    "convert": 4,
    "evaluation": 4,
    "training": 5,
    "analysis": 5,
    "report": 4,
    "tasks": 6,
    "bench": 6,
    "benchmark": 6,
    "finetune": 6,
    "checkpoints": 4,
    "lm_eval_tasks": 5,
    "vllm_plugin": 4,
    "reproduce": 6,
}
HEAVY = {"transformers", "accelerate", "matplotlib", "triton", "tokenizers", "jinja2", "peft"}


def imports(path: Path) -> set[str]:
    """Modules imported when this file is imported (not those inside functions)."""
    found: set[str] = set()
    stack: list[ast.AST] = [ast.parse(path.read_text())]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        stack.extend(ast.iter_child_nodes(node))
    return found


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


FILES = [p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_one_way(path: Path) -> None:
    for module in imports(path):
        assert module != "farspan", f"{path} imports the whole package; name the room"
        if module.startswith("farspan."):
            assert FLOORS[module.split(".")[1]] <= FLOORS[room(path)], f"{path} imports {module}"


@pytest.mark.parametrize(
    "path", [p for p in FILES if room(p) in ("ops", "layers", "cache", "errors")], ids=lambda p: p.stem
)
def test_ops_and_layers_import_torch_and_nothing_heavier(path: Path) -> None:
    allowed = {"triton"} if path.parent.name == "triton" else set()
    assert not {module.split(".")[0] for module in imports(path)} & (HEAVY - allowed)


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name != "triton"], ids=lambda p: p.stem)
def test_kernels_are_imported_only_when_they_run(path: Path) -> None:
    assert not any(f"{module}.".startswith("farspan.ops.triton.") for module in imports(path))


@pytest.mark.parametrize("path", sorted(ROOT.glob("ops/triton/*.py")), ids=lambda p: p.stem)
def test_kernels_import_only_each_other_and_what_a_launch_asks(path: Path) -> None:
    ours = {module for module in imports(path) if module.startswith("farspan.")}
    assert {module for module in ours if not module.startswith("farspan.ops.triton.")} <= {
        "farspan.ops.device",
    }


def test_the_command_line_answers_help_without_loading_torch() -> None:
    code = "import sys, farspan_cli; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_farspan_loads_neither_models_nor_triton_and_auto_classes_find_them_all_the_same() -> None:
    code = """
import sys, farspan
assert not {"transformers.modeling_utils", "triton", "farspan.convert"} & set(sys.modules)
from transformers import AutoConfig, AutoModelForCausalLM
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("farspan", num_hidden_layers=1, vocab_size=16))
assert type(model) is farspan.FarspanForCausalLM
assert farspan.convert.from_pretrained and set(farspan.__all__) <= set(dir(farspan))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
