"""README and docs: every Python block runs, and every command line names commands and options that exist."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from farspan_cli import app as application

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_PYTHON = [page for page in PAGES if "```python" in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, page.name, "exec"), names)


def command_lines(page: Path) -> list[str]:
    """Return the lines of a page's blocks that call farspan, continued ones joined."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    blocks = [block for kind, block in fences if kind != "python"]
    indented = [line for line in text.splitlines() if line.startswith("    ")]
    lines = [line.strip() for block in blocks for line in block.splitlines()] + [line.strip() for line in indented]
    return [line for line in lines if re.match(r"(accelerate launch .*-m farspan_cli|farspan) [a-z]", line)]


@pytest.mark.parametrize("page", [page for page in PAGES if command_lines(page)], ids=lambda page: page.name)
def test_command_lines_name_commands_and_options_that_exist(page: Path) -> None:
    for line in command_lines(page):
        words = shlex.split(line.split(" -m farspan_cli ")[-1].removeprefix("farspan "), comments=True)
        command: Any = typer.main.get_command(application.app)
        while words and hasattr(command, "commands"):
            assert words[0] in command.commands, line
            command = command.commands[words.pop(0)]
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        for word in words:
            if word.startswith("--"):
                assert word.split("=")[0] in known, f"{word} in: {line}"


def test_links_between_pages_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
