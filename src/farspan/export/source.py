"""The model's own source as files that transformers loads with `trust_remote_code`, where farspan is not installed.

transformers finds a model's files by the lines `from .x import …`, and looks for every x beside the file it reads:
folders and absolute imports are not followed. So each module becomes one file of a flat folder and each import of
farspan a relative one; the rest of the text stays as it is.
"""

import ast
import re
import sys
from hashlib import sha256
from pathlib import Path

from farspan.errors import require
from farspan.results import version

ROOT = Path(__file__).parents[1]
ENTRY = "modeling_farspan"
CLASSES = {
    "AutoConfig": ("farspan.models.configuration", "FarspanConfig"),
    "AutoModel": ("farspan.models.modeling", "FarspanModel"),
    "AutoModelForCausalLM": ("farspan.models.modeling", "FarspanForCausalLM"),
    "AutoModelForMaskedLM": ("farspan.models.heads", "FarspanForMaskedLM"),
    "AutoModelForSequenceClassification": ("farspan.models.heads", "FarspanForSequenceClassification"),
}
AUTO_MAP = {auto: f"{ENTRY}.{name}" for auto, (_, name) in CLASSES.items()}
"""What config.json tells the Auto classes. All through one file: transformers keeps a copy of the source for each file
that the map names, and a class is not the same in two copies."""

ALWAYS_THERE = {"torch", "transformers", "huggingface_hub", *sys.stdlib_module_names}


def flat_source() -> dict[str, str]:
    """File name → text, for every module that the model needs.

    >>> files = flat_source()
    >>> "from .farspan_ops_rotary import Plan" in files["farspan_models_attention.py"]
    True
    """
    texts: dict[str, str] = {}
    waiting = [module for module, _ in CLASSES.values()]
    while waiting:
        module = waiting.pop()
        if flat_name(module) not in texts:
            texts[flat_name(module)], needed = rewrite(_path(module).read_text(encoding="utf-8"))
            waiting += needed
    texts[ENTRY] = _entry()
    origin = f"# farspan {version('farspan')}, Apache-2.0; written by `farspan export`.\n"
    ops = f"farspan_{_digest(texts)}::"  # torch lets a second op of one name take the place of the first, everywhere
    return {f"{name}.py": origin + text.replace('"farspan::', f'"{ops}') for name, text in sorted(texts.items())}


def flat_name(module: str) -> str:
    """ "farspan.ops.rotary" → "farspan_ops_rotary"."""
    return module.replace(".", "_")


def rewrite(text: str) -> tuple[str, list[str]]:
    """A module's text with flat imports, and the modules of farspan that it imports.

    >>> print(rewrite("from farspan.ops import Rotary  # angles")[0])
    from .farspan_ops import Rotary  # angles
    >>> print(rewrite("from farspan.ops.cosformer import weights as cosformer")[0])
    from . import farspan_ops_cosformer_weights as cosformer
    """
    lines, needed = text.splitlines(keepends=True), list[str]()
    statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in sorted(statements, key=lambda node: node.lineno, reverse=True):
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
        statement = "".join(lines[first : last + 1])[len(before) :].removesuffix(after)
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        if modules[0].partition(".")[0] == "farspan":
            found, statement = _relative(node, statement)
            needed += found
        elif any(module.partition(".")[0] not in ALWAYS_THERE for module in modules):
            statement = _guarded(statement, before)
        lines[first : last + 1] = [before + statement + after]
    return "".join(lines), needed


def _relative(node: ast.Import | ast.ImportFrom, statement: str) -> tuple[list[str], str]:
    """The modules that an import of farspan needs, and the statement that finds them beside this file."""
    require(
        isinstance(node, ast.ImportFrom) and node.module is not None,
        f"an exported module must say `from farspan.… import …`, got {statement!r}; name what it uses",
    )
    assert isinstance(node, ast.ImportFrom)
    assert node.module is not None
    rooms = [alias.name for alias in node.names if (_path(node.module).parent / f"{alias.name}.py").is_file()]
    if not rooms or _path(node.module).name != "__init__.py":
        pattern = rf"from\s+{re.escape(node.module)}\b"
        return [node.module], re.sub(pattern, f"from .{flat_name(node.module)}", statement, count=1)
    require(len(node.names) == 1, f"an exported module must import one room at a time, got {statement!r}; split it")
    module, alias = f"{node.module}.{rooms[0]}", node.names[0].asname or rooms[0]
    return [module], f"from . import {flat_name(module)} as {alias}"


def _guarded(statement: str, indent: str) -> str:
    """An import that may fail: transformers refuses a model whose other imports are missing, used or not."""
    return f"try:\n{indent}    {statement}\n{indent}except ImportError:\n{indent}    raise"


def _digest(texts: dict[str, str]) -> str:
    return sha256("".join(texts[name] for name in sorted(texts)).encode()).hexdigest()[:8]


def _path(module: str) -> Path:
    place = ROOT.joinpath(*module.split(".")[1:])
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def _entry() -> str:
    """The file that config.json names. Its classes live there, so that a model that is saved again names it too."""
    imports = "".join(f"from .{flat_name(module)} import {name}\n" for module, name in sorted(CLASSES.values()))
    names = ", ".join(name for _, name in sorted(CLASSES.values()))
    return (
        '"""What config.json names: the configuration and the models, from the files beside this one."""\n\n'
        f"{imports}\nfor _class in ({names}):\n    _class.__module__ = __name__\n"
    )
