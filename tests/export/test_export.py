"""`farspan export`: the folder loads where farspan cannot be imported, and its card says what was measured."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.dynamic_module_utils import get_imports, get_relative_import_files
from yaml import safe_load

from farspan import FarspanForCausalLM
from farspan.convert import convert_folder, from_pretrained
from farspan.convert.fingerprint import fingerprint
from farspan.convert.sources import open_source
from farspan.data import load_tokenizer
from farspan.export.source import ALWAYS_THERE, flat_source, rewrite
from tests.convert.test_folder import called
from tests.models.small import MIXED, make

LAYERS = [*MIXED, "alibi", "cosformer", "linear-coca"]
"""Every kind of layer, a window and one without positions."""

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


def result(path: Path, rows: list[dict[str, Any]], **changes: Any) -> Path:
    """A file as `farspan eval` writes it."""
    head = {"schema": 1, "command": "farspan eval", "commit": "abc", "versions": {"torch": "2"}, "device": "CPU"}
    path.write_text(json.dumps({**head, "seed": 0, "rows": rows, **changes}))
    return path


def perplexity(length: int, ppl: float, scaling: str = "none", mode: str = "sliding", **more: Any) -> dict[str, Any]:
    counts = {"stride": 512, "nll": 1.0, "tokens": 4096, "texts": 2}
    return {"length": length, "mode": mode, "scaling": scaling, "ppl": ppl, **counts, **more}


def passkey(length: int, correct: int, cases: int = 10) -> dict[str, Any]:
    share = {"cases": cases, "correct": correct}
    return {"length": length, "scaling": "ntk-4", **share, "near": share, "far": share, "outcomes": []}


def pairs(kind: str, correct: int, cases: int = 100, **names: str) -> dict[str, Any]:
    return {"kind": kind, "set": "", "field": "", "scaling": "none", "cases": cases, "correct": correct, **names}


def bits(value: float, length: int = 64) -> dict[str, Any]:
    return {"length": length, "scaling": "none", "bits_per_byte": value, "bytes": 3000, "texts": 2, "nll": 1.0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, as training leaves it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("trained")
    options = {"num_hidden_layers": len(LAYERS), "vocab_size": 257, "train_length": 64}
    make(LAYERS, dtype=torch.float32, cosformer_beyond="decay", **options).save_pretrained(folder)
    load_tokenizer("bytes").save(folder)
    return folder


@pytest.fixture(scope="module")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("exported")
    rows = [perplexity(512, 20.25), perplexity(1024, 19.5), perplexity(64, 21.0, mode="truncated")]
    first = result(parent / "ppl.json", rows, command="farspan eval ppl `x`")
    second = result(parent / "ntk.json", [perplexity(1024, 18.75, "ntk-4"), passkey(512, 7)])
    options = ["--results", first, "--results", second, "--name", "owner/toy", "--license", "apache-2.0"]
    status, out, err = called("export", trained, "--out", parent / "hub", *options)
    assert status == 0, err
    assert "written: " in out
    return parent / "hub"


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
    assert reached == {path.name for path in exported.glob("*.py")} == set(flat_source())
    assert {package for path in exported.glob("*.py") for package in get_imports(path)} <= ALWAYS_THERE


def test_exported_ops_do_not_take_the_place_of_our_own() -> None:
    """torch lets a second op of the same name replace the first for everyone."""
    names = re.findall(r'custom_op\("(\w+)::(\w+)"', "".join(flat_source().values()))
    assert len(names) >= 3
    assert all(re.fullmatch(r"farspan_[0-9a-f]{8}", space) for space, _ in names)


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
    [("import farspan.ops", "name what it uses"), ("from farspan.ops.cosformer import kernel, run", "split it")],
)
def test_imports_that_cannot_be_flat_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rewrite(text)


def test_the_card_holds_the_numbers_and_where_they_come_from(exported: Path) -> None:
    _, front, card = (exported / "README.md").read_text().split("---\n", 2)
    head = safe_load(front)
    assert head["license"] == "apache-2.0"
    assert head["pipeline_tag"] == "text-generation"
    assert {"farspan", "coca", "cosformer", "linear-coca"} <= set(head["tags"])
    assert "an experiment of farspan's own" in card
    assert "set_rope_parameters" not in card  # its dynamic NTK would be refused
    assert "| Scaling | 512 | 1,024 |" in card
    assert "| no scaling | 20.25 | 19.50 |" in card
    assert "| dynamic NTK 4 | — | 18.75 |" in card
    assert "| dynamic NTK 4 | 0.70 (95% 0.40–0.89) |" in card
    assert "cut to the training length have perplexity 21.00" in card
    assert "`` farspan eval ppl `x` ``; CPU, commit abc" in card
    assert " ".join(card.split()).count("seed 0, torch 2; nothing in the file ties it to these weights") == 2
    assert "1 layer coca-exact (window 8), 1 layer rope, 1 layer coca-slack (without positions)" in card


def card_of(model: FarspanForCausalLM, folder: Path, *rows: dict[str, Any]) -> str:
    """The card of a model, with these results."""
    model.save_pretrained(folder / "model")
    load_tokenizer("bytes").save(folder / "model")
    options = ["--results", result(folder / "rows.json", list(rows))] if rows else []
    assert called("export", folder / "model", *options, "--out", folder / "hub")[0] == 0
    return (folder / "hub" / "README.md").read_text()


@pytest.mark.parametrize(
    ("rows", "line", "said"),
    [
        ([], 'rope_type="dynamic", factor=4.0', "not been measured for this model"),
        ([perplexity(512, 20.0)], 'rope_type="dynamic", factor=4.0', "not been measured for this model"),
        ([perplexity(512, 20.0, "ntk-8+log")], 'rope_type="dynamic", factor=4.0', "not been measured for this model"),
        ([perplexity(512, 20.0, "ntk-8")], 'rope_type="dynamic", factor=8.0', "is measured below"),
        ([bits(1.0) | {"scaling": "ntk-2/per_request"}], 'factor=2.0, mode="per_request"', "is measured below"),
    ],
)
def test_the_card_offers_dynamic_ntk_and_says_whether_it_was_measured(
    rows: list[dict[str, Any]], line: str, said: str, tmp_path: Path
) -> None:
    model = make(LAYERS[:-1], dtype=torch.float32, num_hidden_layers=5, vocab_size=257)
    card = card_of(model, tmp_path, *rows)
    assert f"{line})\n```" in card
    assert said in card
    assert "experiment" not in card


@pytest.mark.parametrize("law", ["linear", "dynamic", "yarn", "llama3"])
def test_the_card_of_a_model_with_a_law_of_its_own_leaves_it_alone(law: str, tmp_path: Path) -> None:
    """Another law in its place would change what the model computes inside its training length."""
    rope = {"rope_type": law, "rope_theta": 10_000.0, "factor": 2.0}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if law == "llama3" else {}
    model = make(MIXED, dtype=torch.float32, num_hidden_layers=len(MIXED), vocab_size=257, rope_parameters=rope)
    card = card_of(model, tmp_path, perplexity(512, 20.0, "ntk-4"))
    assert f'a law of its own, `"rope_type": "{law}"`, factor 2, and' in card
    assert "model.set_rope_parameters" not in card


def test_the_snippet_of_the_card_runs_as_it_stands_and_asks_nothing(tmp_path: Path) -> None:
    """Where farspan is not installed, transformers asks before it runs a folder's code, unless it was told."""
    make(MIXED, dtype=torch.float32, num_hidden_layers=len(MIXED), vocab_size=257).save_pretrained(tmp_path / "model")
    load_tokenizer("bytes").save(tmp_path / "model")
    out = tmp_path / "owner" / "toy"
    assert called("export", tmp_path / "model", "--name", "owner/toy", "--out", out)[0] == 0
    first, option = ((out / "README.md").read_text().split("```python\n")[i].split("```")[0] for i in (1, 2))
    snippet = first.replace("\nids =", f"\n{option}ids =")
    assert "set_rope_parameters" in option
    blocked = "import sys\nsys.modules['farspan'] = None\n" + snippet
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", blocked],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Once upon a time")
    assert "[y/N]" not in done.stdout


def test_the_card_takes_what_every_evaluation_writes(trained: Path, tmp_path: Path) -> None:
    """The files themselves, from the commands themselves."""
    (tmp_path / "text.txt").write_text("words and words " * 20)
    lines = [{"good": "a cat", "bad": "cat a", "set": f"s{i}", "field": field} for i, field in enumerate("fgf")]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    text, options = ["--text", tmp_path / "text.txt"], []
    for name, *arguments in (
        ("ppl", *text, "--lengths", 64, "--text-tokens", 128),
        ("passkey", "--lengths", 300, "--cases", 2, "--new-tokens", 2),
        ("bits", *text),
        ("pairs", "--pairs", tmp_path / "pairs.jsonl"),
    ):
        options += ["--results", tmp_path / f"{name}.json"]
        status, _, err = called("eval", name, trained, *arguments, "--out", options[-1])
        assert status == 0, err
    assert called("export", trained, *options, "--out", tmp_path / "hub")[0] == 0
    card = (tmp_path / "hub" / "README.md").read_text()
    (row,) = json.loads((tmp_path / "bits.json").read_text())["rows"]
    assert "| Scaling | bits a byte, windows of 64 | minimal pairs | f | g |" in card
    assert f"| no scaling | {row['bits_per_byte']:.3f} | " in card
    assert "(320 bytes of 1 text)" in card
    assert "the share of 3 (f 2, g 1) whose right sentence" in card
    assert card.count("### ") == 3
    assert "nothing in the file ties" not in " ".join(card.split())


def test_results_of_another_model_are_refused_and_those_of_another_law_are_not(tmp_path: Path) -> None:
    """The other two have the same tensors in another attention, and the same attention with one number changed."""
    options = {"num_hidden_layers": 2, "vocab_size": 257, "train_length": 64}
    mine = make("coca-exact", dtype=torch.float32, **options)
    mine.save_pretrained(tmp_path / "mine")
    other = make("coca-exact", dtype=torch.float32, **options)
    other.load_state_dict(mine.state_dict())
    other.model.norm.weight.data[3] += 0.5
    other.save_pretrained(tmp_path / "moved")
    slack = make("coca-slack", dtype=torch.float32, **options)
    slack.load_state_dict(mine.state_dict())
    slack.save_pretrained(tmp_path / "slack")
    (tmp_path / "text.txt").write_text("words and words " * 20)
    for name in ("mine", "moved", "slack"):
        load_tokenizer("bytes").save(tmp_path / name)
        for law in ([], ["--ntk", 4, "--log-length"]):
            measured = ("eval", "ppl", tmp_path / name, "--text", tmp_path / "text.txt", "--lengths", 64)
            out = tmp_path / f"{name}{len(law)}.json"
            assert called(*measured, "--text-tokens", 128, *law, "--out", out)[0] == 0
    for name in ("moved", "slack"):
        status, _, err = called(
            "export", tmp_path / "mine", "--results", tmp_path / f"{name}0.json", "--out", tmp_path / "x"
        )
        assert status == 2
        assert f"--results must be about '{tmp_path / 'mine'}', got '{name}0.json' of another model" in err
        assert err.count("\n") == 1
        assert not (tmp_path / "x").exists()
    results = ["--results", tmp_path / "mine0.json", "--results", tmp_path / "mine3.json"]
    assert called("export", tmp_path / "mine", *results, "--dtype", "bfloat16", "--out", tmp_path / "hub")[0] == 0
    assert "dynamic NTK 4, log length" in (tmp_path / "hub" / "README.md").read_text()


@pytest.mark.parametrize("case", ["shards", "llama", "bfloat16"])
def test_a_fingerprint_is_that_of_the_numbers_and_not_of_the_file(case: str, tmp_path: Path) -> None:
    lengths = {"train_length": 64, "max_position_embeddings": 64}
    model = make("rope", dtype=torch.float32, num_hidden_layers=2, vocab_size=257, **lengths)
    if case == "bfloat16":
        model.to(torch.bfloat16).float()
    model.save_pretrained(tmp_path / "model")
    if case == "shards":
        model.save_pretrained(tmp_path / "copy", max_shard_size="20KB")
    else:
        convert_folder(
            tmp_path / "model",
            tmp_path / "copy",
            to="llama" if case == "llama" else None,
            dtype=torch.bfloat16 if case == "bfloat16" else None,
        )
    first, second = (fingerprint(open_source(tmp_path / name)) for name in ("model", "copy"))
    assert first == second


def test_minimal_pairs_stand_on_the_card_by_field_with_their_intervals(trained: Path, tmp_path: Path) -> None:
    """A field that an earlier result spells in two ways is one."""
    rows = [
        pairs("all", 150, 200),
        pairs("field", 60, field="syntax/semantics"),
        pairs("field", 90, field="syntax_semantics"),
        pairs("set", 60, field="syntax/semantics", set="one"),
    ]
    path = result(tmp_path / "pairs.json", rows)
    assert called("export", trained, "--results", path, "--out", tmp_path / "hub")[0] == 0
    card = (tmp_path / "hub" / "README.md").read_text()
    assert "| Scaling | minimal pairs | syntax\\_semantics |" in card
    assert "| no scaling | 0.750 (95% 0.686–0.805) | 0.750 (95% 0.686–0.805) |" in card


def test_the_card_of_a_converted_model_names_its_original(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--owner--small-llama" / "snapshots" / "0a1b"
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**shape, vocab_size=257)).save_pretrained(snapshot)
    load_tokenizer("bytes").save(snapshot)
    convert_folder(snapshot, tmp_path / "cached", "coca-exact")
    copytree(snapshot, tmp_path / "small_llama")
    convert_folder(tmp_path / "small_llama", tmp_path / "local", "coca-exact")
    for source, options, named, linked in (
        ("cached", [], "owner/small-llama", "owner/small-llama"),
        ("local", [], "small_llama", None),
        ("local", ["--base-model", "mine"], "mine", "mine"),
        ("small_llama", [], "small_llama", None),
    ):
        out = tmp_path / f"{source}{len(options)}-exported"
        assert called("export", tmp_path / source, *options, "--out", out)[0] == 0
        _, front, card = (out / "README.md").read_text().split("---\n", 2)
        assert f"started from `{named}`." in card
        assert safe_load(front).get("base_model") == linked
        assert str(tmp_path) not in card


def test_a_card_without_results_says_so(trained: Path, tmp_path: Path) -> None:
    assert called("export", trained, "--out", tmp_path / "hub", "--dtype", "bfloat16")[0] == 0
    assert "Nothing has been measured." in (tmp_path / "hub" / "README.md").read_text()
    assert from_pretrained(tmp_path / "hub", None).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([[perplexity(512, 20.0, variant="a")], [perplexity(512, 20.0, "ntk-4", variant="b")]], "about one model"),
        ([[perplexity(512, 20.0)], [perplexity(512, 21.0)]], "measured before with another outcome"),
        ([[bits(1.0)], [bits(1.5)]], "none, bits a byte, 64 was measured before with another outcome"),
        ([[pairs("all", 9)], [pairs("all", 8)]], "none, minimal pairs, all was measured before"),
        ([[pairs("all", 900)]], "correct must lie in 0 … cases, got 900 of 100"),
        ([[{"loss": 1.0}]], "give files of `farspan eval`"),
        ([[perplexity(512, 20.0, texts="two")]], "texts must be a whole number"),
        ([None], "which is none"),
    ],
)
def test_results_that_cannot_be_right_are_refused(
    files: list[Any], message: str, trained: Path, tmp_path: Path
) -> None:
    paths = [tmp_path / f"{i}.json" for i, _ in enumerate(files)]
    for path, rows in zip(paths, files, strict=True):
        if rows is not None:
            result(path, rows)
    options = [part for path in paths for part in ("--results", path)]
    status, _, err = called("export", trained, "--out", tmp_path / "hub", *options)
    assert status == 2
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "hub").exists()


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
