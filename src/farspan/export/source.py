"""Write the model's source as files that transformers loads with `trust_remote_code`, without farspan installed.

transformers finds a model's files by the lines `from .x import …` and looks for every x in the same folder. So each
module becomes one file of a flat folder, and each import of farspan a relative one. The Triton kernels are left out:
exported models take them from an installed farspan, and run on torch without it.
"""

import ast
import re
import sys
from collections.abc import Collection
from pathlib import Path

from farspan.errors import require
from farspan.results import version

ROOT = Path(__file__).parents[1]
ENTRY = "modeling_farspan"
CLASSES = {
    "AutoConfig": "FarspanConfig",
    "AutoModel": "FarspanModel",
    "AutoModelForCausalLM": "FarspanForCausalLM",
    "AutoModelForMaskedLM": "FarspanForMaskedLM",
    "AutoModelForSequenceClassification": "FarspanForSequenceClassification",
}
AUTO_MAP = {auto: f"{ENTRY}.{name}" for auto, name in CLASSES.items()}
"""What config.json tells the Auto classes. All through one file: transformers keeps a copy of the source for each file
that the map names, and a class is not the same in two copies."""

ALWAYS_THERE = {"torch", "transformers", "huggingface_hub", *sys.stdlib_module_names}
OPTIONAL = {"linear-coca": "farspan.ops.linear_coca"}
"""Kind of attention → the module that only models with such layers need."""


def flat_source(kinds: Collection[str] = ()) -> dict[str, str]:
    """Return file name → text for every module that a model with these kinds of attention needs.

    >>> files = flat_source()
    >>> "from .farspan_ops_rotary import Rotary" in files["modeling_farspan.py"], len(files)
    (True, 15)
    """
    left_out = {module for kind, module in OPTIONAL.items() if kind not in kinds}
    texts: dict[str, str] = {}
    waiting = [f"farspan.{ENTRY}"]
    while waiting:
        module = waiting.pop()
        if flat_name(module) not in texts:
            texts[flat_name(module)], needed = rewrite(_path(module).read_text(encoding="utf-8"), left_out)
            waiting += needed
    # The configuration is loaded through the entry, too: a model that is saved again must name it.
    texts[ENTRY] += "\nFarspanConfig.__module__ = __name__\n"
    origin = f"# farspan {version('farspan')}, Apache-2.0; written by `farspan export`.\n"
    return {f"{name}.py": origin + text for name, text in sorted(texts.items())}


def flat_name(module: str) -> str:
    """Return the file of a module without its ending.

    >>> flat_name("farspan.ops.rotary"), flat_name("farspan.modeling_farspan")
    ('farspan_ops_rotary', 'modeling_farspan')
    """
    return module.removeprefix("farspan.") if module.endswith("_farspan") else module.replace(".", "_")


def rewrite(text: str, left_out: Collection[str] = ()) -> tuple[str, list[str]]:
    """Return a module's text with flat imports, and the modules of farspan that it imports.

    >>> print(rewrite("from farspan.ops import Rotary  # angles")[0])
    from .farspan_ops import Rotary  # angles
    """
    lines, needed = text.splitlines(keepends=True), list[str]()
    statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in sorted(statements, key=lambda node: node.lineno, reverse=True):
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
        statement = "".join(lines[first : last + 1])[len(before) :].removesuffix(after)
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        ours = modules[0].partition(".")[0] == "farspan"
        if ours and not modules[0].startswith("farspan.ops.triton") and modules[0] not in left_out:
            found, statement = _relative(node, statement)
            needed += found
        elif any(module.partition(".")[0] not in ALWAYS_THERE for module in modules):
            statement = _guarded(statement, before)
        lines[first : last + 1] = [before + statement + after]
    return "".join(lines), needed


def _relative(node: ast.Import | ast.ImportFrom, statement: str) -> tuple[list[str], str]:
    """Return the modules that an import of farspan needs, and the statement that finds them in the same folder."""
    require(
        isinstance(node, ast.ImportFrom) and node.module is not None,
        f"an exported module must say `from farspan.… import …`, got {statement!r}; name what it uses",
    )
    assert isinstance(node, ast.ImportFrom)
    assert node.module is not None
    if node.module == "farspan":  # `from farspan import modeling_farspan`
        (alias,) = node.names
        module = f"farspan.{alias.name}"
        return [module], f"from . import {flat_name(module)}"
    pattern = rf"from\s+{re.escape(node.module)}\b"
    return [node.module], re.sub(pattern, f"from .{flat_name(node.module)}", statement, count=1)


def _guarded(statement: str, indent: str) -> str:
    """Return an import that may fail: transformers rejects a model whose other imports are missing, used or not."""
    return f"try:\n{indent}    {statement}\n{indent}except ImportError:\n{indent}    raise"


def _path(module: str) -> Path:
    place = ROOT.joinpath(*module.split(".")[1:])
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
