"""Imports run one way, and the lower modules stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "farspan"
FLOORS = {
    "errors": 0,
    "utils": 0,
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


def module_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


FILES = [p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py"]


def test_every_module_has_a_floor() -> None:
    assert set(FLOORS) == {module_of(path) for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_one_way(path: Path) -> None:
    is_kernel, found = path.parent.name == "triton", imports(path)
    assert "farspan" not in found, f"{path} imports the whole package; name the module"
    ours = {module for module in found if module.startswith("farspan.")}
    for module in ours:
        assert FLOORS[module.split(".")[1]] <= FLOORS[module_of(path)], f"{path} imports {module}"
    if module_of(path) in ("ops", "layers", "cache", "errors"):
        assert not {module.split(".")[0] for module in found} & (HEAVY - ({"triton"} if is_kernel else set()))
    kernels = {module for module in ours if f"{module}.".startswith("farspan.ops.triton.")}
    if is_kernel:
        assert ours - kernels <= {"farspan.ops.device"}  # what a launch asks
    else:
        assert not kernels  # they are imported when they run


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
