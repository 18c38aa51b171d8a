"""`farspan export`: the folder loads where farspan cannot be imported, and its card says what was measured."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.dynamic_module_utils import get_imports, get_relative_import_files

from farspan import FarspanConfig, FarspanForCausalLM
from farspan.checkpoints.export import ALWAYS_THERE, flat_source, rewrite
from farspan.convert import from_pretrained
from farspan.data import load_tokenizer
from tests.command_line import called

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
exec(open(f"{folder}/README.md").read().split("```python\\n")[1].split("```")[0])
assert not [name for name in sys.modules if name.startswith("farspan.")]
torch.save({"logits": logits, "generated": generated}, out)
"""


def test_the_folder_loads_and_is_saved_again_where_farspan_is_not_installed(exported: Path, tmp_path: Path) -> None:
    """So does the snippet of the card; and nothing asks whether to run the folder's code."""
    command = [sys.executable, "-c", WITHOUT_FARSPAN, "owner/toy", str(tmp_path / "again"), str(tmp_path / "out.pt")]
    options: dict[str, Any] = {"cwd": exported.parents[1], "env": {**os.environ, "HF_HOME": str(tmp_path / "home")}}
    done = subprocess.run(command, **options, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Once upon a time")
    assert "[y/N]" not in done.stdout
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
    assert reached == {path.name for path in exported.glob("*.py")} == set(flat_source())
    assert {package for path in exported.glob("*.py") for package in get_imports(path)} <= ALWAYS_THERE


def test_an_exported_model_has_few_files_and_no_ops_or_kernels_of_its_own() -> None:
    """torch lets a second op of the same name replace the first for everyone."""
    assert len(flat_source()) <= 16
    assert not re.findall(r"custom_op|triton\.jit", "".join(flat_source().values()))


@pytest.mark.parametrize(
    ("before", "after", "needed"),
    [
        (
            "from farspan.ops import (\n    Rotary,  # é\n    NTK,\n)\n",
            "from .farspan_ops import (\n    Rotary,  # é\n    NTK,\n)\n",
            ["farspan.ops"],
        ),
        ("if x:\n    import triton  # y\n", "if x:\n    try:\n        import triton\n    except ImportError:\n", []),
    ],
    ids=["lines and comments stay", "other packages may fail"],
)
def test_imports_are_rewritten_and_nothing_else(before: str, after: str, needed: list[str]) -> None:
    text, found = rewrite(before)
    assert text.startswith(after)
    assert found == needed
    compile(text, "rewritten", "exec")


# Plain folders of another family


def hybrid(folder: Path, attention: str = "hybrid-rope", **options: Any) -> FarspanForCausalLM:
    """A small random model with its tokenizer; window 8, trained at 64."""
    torch.manual_seed(0)
    shape = {"num_key_value_heads": 2, "vocab_size": 257, "window": 8, "global_every": 2, **options}
    model = FarspanForCausalLM(FarspanConfig.preset("tiny", attention=attention, **shape)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    load_tokenizer("bytes").save(folder)
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"head_dim": 16, "tie_word_embeddings": False, "mlp_bias": True, "qkv_bias": True, "out_bias": True},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e5, "factor": 4.0}},
    ],
    ids=["plain", "widths and biases", "yarn"],
)
def test_a_hybrid_is_a_smollm3_in_prefill_and_in_decoding_beyond_the_window(options: Any, tmp_path: Path) -> None:
    model, ids = hybrid(tmp_path / "model", **options), torch.randint(1, 257, (2, 48))
    status, out, err = called("export", tmp_path / "model", "--as", "smollm3", "--out", tmp_path / "plain")
    assert (status, "written: " in out) == (0, True), err
    assert err == (
        "farspan: log_length is lost: past 64 tokens the scores of global layers no longer grow with the logarithm of "
        "the length, and logits differ\n"
    )
    assert not list((tmp_path / "plain").glob("*.py"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
    assert type(plain).__module__ == "transformers.models.smollm3.modeling_smollm3"
    with torch.no_grad():
        expected = model(ids).logits
        assert (plain(ids).logits - expected).abs().max() <= 1e-5
        first = plain(ids[:, :20], use_cache=True)
        logits, cache = [first.logits], first.past_key_values
        for step in range(20, 48):
            logits.append(plain(ids[:, step : step + 1], past_key_values=cache, use_cache=True).logits)
        assert (torch.cat(logits, 1) - expected).abs().max() <= 1e-5
        longer = torch.randint(1, 257, (1, 96))
        model.set_log_length(False)  # all that is lost
        assert (plain(longer).logits - model(longer).logits).abs().max() <= 1e-5
    settings = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": 0}
    assert torch.equal(plain.generate(ids, **settings), model.generate(ids, **settings))
    assert AutoTokenizer.from_pretrained(tmp_path / "plain")("ab").input_ids == [98, 99]
    back = from_pretrained(tmp_path / "plain")
    assert back.config.attention_specs == model.config.attention_specs


def test_what_is_no_smollm3(tmp_path: Path) -> None:
    hybrid(tmp_path / "model", "hybrid-pope")
    status, _, err = called("export", tmp_path / "model", "--as", "smollm3", "--out", tmp_path / "plain")
    assert (status, err.count("\n")) == (2, 1)
    assert "a smollm3 model cannot have this model's attention (pope window 8, rope without rotation" in err
    assert not (tmp_path / "plain").exists()
