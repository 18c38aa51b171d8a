"""The lm-eval tasks without lm-eval: what they ask is what `farspan eval` asks; docs/ecosystem.md has a run with it."""

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from farspan.data import load_tokenizer, train_bpe
from farspan.data.passkey import FILLER, INTRODUCTION, make_cases
from farspan.lm_eval_tasks import PATH, build
from tests.command_line import called

FILES = sorted(PATH.glob("*.yaml"))


class Loader(yaml.SafeLoader):
    """Reads `!function build.name` as lm-eval does: a function of the Python file beside the YAML."""


def function(loader: yaml.Loader, node: yaml.ScalarNode) -> Any:
    module, _, name = loader.construct_scalar(node).partition(".")
    assert (PATH / f"{module}.py").is_file()
    return getattr(build, name)


Loader.add_constructor("!function", function)


@pytest.fixture(autouse=True)
def _lists_for_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` comes with lm-eval; a list has all that is tested here."""
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(Dataset=SimpleNamespace(from_list=list)))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_task_names_functions_that_exist_and_metrics_that_are_returned(path: Path) -> None:
    task = yaml.load(path.read_text(), Loader)
    assert task["task"] == path.stem
    doc = {"key": "12345", "text": "two words", "tokens": 4, "prompt": "?"}
    found = task["process_results"](doc, ["12345" if task["output_type"] == "generate_until" else -2.0])
    assert set(found) == {metric["metric"] for metric in task["metric_list"]}


def test_the_command_names_the_folder_without_loading_torch() -> None:
    status, out, _ = called("tasks-path")
    assert status == 0
    assert sorted(Path(out.strip()).glob("*.yaml")) == FILES
    assert len(FILES) == 2
    code = "import sys; sys.argv = ['farspan', 'tasks-path']\nfrom farspan_cli.app import app\nimport farspan_cli\n"
    code += "app(standalone_mode=False); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_prompts_are_those_of_farspan_eval() -> None:
    tokenizer = load_tokenizer("bytes")
    docs = build.passkey(pretrained="elsewhere", tokenizer="bytes", length=600, cases=5, seed=3, version=1.0)["test"]
    cases = make_cases(tokenizer, 600, 5, 3)
    assert [tokenizer.encode(doc["prompt"]) for doc in docs] == [case.prompt for case in cases]
    for doc, case in zip(docs, cases, strict=True):
        assert build.found(doc, [f"… {case.key}!"]) == {"accuracy": 1.0}
        assert build.found(doc, [str(case.key)[:-1]])["accuracy"] == 0.0


def test_texts_are_cut_to_whole_tokens(tmp_path: Path) -> None:
    tokenizer = train_bpe([INTRODUCTION, FILLER * 3], 300, tmp_path)
    (tmp_path / "long.txt").write_text(FILLER * 20)
    (tmp_path / "short.txt").write_text(FILLER)
    texts = [str(tmp_path / name) for name in ("long.txt", "short.txt")]
    (doc,) = build.perplexity(pretrained=str(tmp_path), text=texts, text_tokens=200)["test"]
    assert len(tokenizer.encode(doc["text"])) == doc["tokens"] == 200
    assert (FILLER * 20).startswith(doc["text"])
    found = build.losses(doc, (-400.0,))
    assert build.token_perplexity([found["ppl"]]) == pytest.approx(math.exp(2))
    assert found["bits_per_byte"] == (-400.0, len(doc["text"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pretrained": "bytes"}, "text must name files"),
        ({"pretrained": "bytes", "text": "{}", "text_tokens": 10**6}, "use longer texts or fewer tokens"),
        ({"text": "{}"}, "add tokenizer=DIR"),
    ],
)
def test_what_is_missing_is_named(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(FILLER)
    options = {
        name: value.format(tmp_path / "a.txt") if isinstance(value, str) else value for name, value in options.items()
    }
    with pytest.raises(ValueError, match=message):
        build.perplexity(**options)
