"""`farspan export`: the folder loads where farspan cannot be imported, and its card says what was measured."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.dynamic_module_utils import get_imports, get_relative_import_files

from farspan import FarspanForCausalLM
from farspan.convert import from_pretrained
from farspan.data import load_tokenizer
from farspan.export.source import ALWAYS_THERE, flat_source, rewrite
from tests.command_line import called
from tests.models.small import make

WITHOUT_FARSPAN = """
import sys
sys.modules["farspan"] = None  # importing it, or anything in it, is an ImportError now
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

folder, again, out = sys.argv[1:]
ids = torch.arange(1, 41)[None]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
assert "transformers_modules" in type(model).__module__
with torch.no_grad():
    logits = model(ids).logits
    generated = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    model.save_pretrained(again)
    resaved = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True).eval()
    assert torch.equal(resaved(ids).logits, logits)
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True, num_labels=3)
    assert classifier(ids).logits.shape == (1, 3)
exec(open(f"{folder}/README.md").read().split("```python\\n")[1].split("```")[0].replace('"owner/toy"', "folder"))
assert not [name for name in sys.modules if name.startswith("farspan.")]
torch.save({"logits": logits, "generated": generated}, out)
"""


def test_the_folder_loads_and_is_saved_again_where_farspan_is_not_installed(exported: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_FARSPAN, exported, tmp_path / "again", tmp_path / "out.pt"]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found, ids = torch.load(tmp_path / "out.pt"), torch.arange(1, 41)[None]
    model = FarspanForCausalLM.from_pretrained(exported).eval()
    with torch.no_grad():
        assert torch.equal(found["logits"], model(ids).logits)
        assert torch.equal(found["generated"], model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0))


def test_farspan_and_transformers_read_the_folder_as_they_read_the_original(trained: Path, exported: Path) -> None:
    ids = torch.arange(1, 41)[None]
    expected = FarspanForCausalLM.from_pretrained(trained).eval()
    for model in (AutoModelForCausalLM.from_pretrained(exported), from_pretrained(exported, None)):
        assert type(model) is FarspanForCausalLM
        with torch.no_grad():
            assert torch.equal(model.eval()(ids).logits, expected(ids).logits)
    assert AutoTokenizer.from_pretrained(exported)("ab").input_ids == [98, 99]
    assert (exported / "generation_config.json").is_file()


def test_transformers_finds_every_file_and_asks_for_no_other_package(exported: Path) -> None:
    """The hub's loader fetches what relative imports name, and refuses packages that are missing, used or not."""
    entry = exported / "modeling_farspan.py"
    reached = {Path(file).name for file in get_relative_import_files(entry)} | {entry.name}
    assert reached == {path.name for path in exported.glob("*.py")} == set(flat_source({"linear-coca"}))
    assert {package for path in exported.glob("*.py") for package in get_imports(path)} <= ALWAYS_THERE


def test_an_exported_model_has_few_files_and_no_ops_or_kernels_of_its_own() -> None:
    """torch lets a second op of the same name replace the first for everyone."""
    assert len(flat_source()) <= 15
    assert set(flat_source({"linear-coca"})) - set(flat_source()) == {"farspan_ops_linear_coca.py"}
    assert not re.findall(r"custom_op|triton\.jit", "".join(flat_source({"linear-coca"}).values()))


@pytest.mark.parametrize(
    ("before", "after", "needed"),
    [
        (
            "from farspan.ops import (\n    Rotary,  # é\n    NTK,\n)\n",
            "from .farspan_ops import (\n    Rotary,  # é\n    NTK,\n)\n",
            ["farspan.ops"],
        ),
        ("if x:\n    import triton  # y\n", "if x:\n    try:\n        import triton\n    except ImportError:\n", []),
        ("import torch.nn as nn\nimport os\n", "import torch.nn as nn\nimport os\n", []),
        ("x = 'from farspan.ops import y'\n", "x = 'from farspan.ops import y'\n", []),
    ],
    ids=["lines and comments stay", "other packages may fail", "what is always there", "text is no import"],
)
def test_imports_are_rewritten_and_nothing_else(before: str, after: str, needed: list[str]) -> None:
    text, found = rewrite(before)
    assert text.startswith(after)
    assert found == needed
    compile(text, "rewritten", "exec")


@pytest.mark.parametrize(
    ("text", "message"),
    [("import farspan.ops", "name what it uses")],
)
def test_imports_that_cannot_be_flat_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rewrite(text)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    make(dtype=torch.float32, vocab_size=256).save_pretrained(tmp_path / "model")
    load_tokenizer("bytes").save(tmp_path / "model")
    status, _, err = called("export", tmp_path / "model", "--out", tmp_path / "hub")
    assert status == 2
    assert "must have at most the model's vocab_size = 256 tokens, got 257; put" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "hub").exists()


def test_a_model_without_its_tokenizer_is_refused(tmp_path: Path) -> None:
    make(dtype=torch.float32).save_pretrained(tmp_path / "model")
    status, _, err = called("export", tmp_path / "model", "--out", tmp_path / "hub")
    assert status == 2
    assert "must come with its tokenizer" in err
    assert not (tmp_path / "hub").exists()
