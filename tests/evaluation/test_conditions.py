"""The scaling of a model is the one that was asked for, and shares of the work add up to all of it."""

import json
from pathlib import Path

import pytest

from farspan import FarspanConfig, FarspanForCausalLM
from farspan.data import load_tokenizer
from farspan.evaluation import scaling_of, set_scaling
from farspan.evaluation.conditions import check_scaling
from tests.command_line import program
from tests.processes import Started, in_two

NAMES = ["none", "ntk-4", "dynamic_ntk-4", "dynamic_ntk-2.5/per_request", "yarn-4", "linear-2", "none+log"]


def model(**rope: object) -> FarspanForCausalLM:
    values = {"rope_parameters": {"rope_theta": 500.0, **rope}} if rope else {}
    return FarspanForCausalLM(FarspanConfig.preset("tiny", num_hidden_layers=1, **values))


@pytest.mark.parametrize("name", [*NAMES, "dynamic_ntk-4/per_request+log"])
@pytest.mark.parametrize("own", [{}, {"rope_type": "dynamic", "factor": 4.0}, {"rope_type": "linear", "factor": 2.0}])
def test_a_scaling_of_the_models_own_is_replaced(own: dict[str, object], name: str) -> None:
    made = model(**own)
    theta = made.config.rotary().base
    set_scaling(made, name)
    assert scaling_of(made.config) == name
    assert made.model.layers[0].self_attn.rotary.scaling == made.config.rotary().scaling
    assert made.config.rotary().base == theta


def test_its_own_scaling_is_left_as_it_is() -> None:
    made = model(rope_type="yarn", factor=4.0, beta_fast=16.0)
    before = made.config.rotary().scaling
    for name in ("yarn-4", "own", "own+log"):
        set_scaling(made, name)
        assert made.config.rotary().scaling == before
    assert scaling_of(made.config) == "yarn-4+log"


@pytest.mark.parametrize(
    "name", ["pi-4", "ntk4", "ntk", "dynamic_ntk-0.5", "yarn-4/per_request", "ntk-nan", "", "none+logs", "yarn-9999999"]
)
def test_an_unknown_scaling_raises(name: str) -> None:
    with pytest.raises(ValueError, match=r"scaling must (be|have) .*got .*; try dynamic_ntk-4"):
        check_scaling(name)


def _evaluations(folder: str, place: str) -> None:
    """Measure everything once; under a launcher this runs in every process."""
    base, out = Path(folder), Path(place)
    text, few = base / "a.jsonl", ["--cases", "5", "--lengths", "250"]
    for name, options in {
        "ppl": ["--text", text, "--lengths", "16,64", "--stride", "8", "--scaling", "none,dynamic_ntk-4"],
        "positions": ["--text", text],
        "passkey": few,
        "retrieval": [*few, "--tasks", "abcdigits"],
        "pairs": ["--pairs", base / "pairs.jsonl"],
        "bits": ["--text", text],
    }.items():
        given = ["eval", name, base / "model", *options, "--out", out / f"{name}.json"]
        with pytest.raises(SystemExit) as stopped:
            program("import torch; torch.set_num_threads(1)", *map(str, given))
        assert not stopped.value.code, name


def test_two_processes_give_the_rows_of_one(tmp_path: Path) -> None:
    config = FarspanConfig.preset("tiny", num_hidden_layers=1, vocab_size=257, train_length=16)
    FarspanForCausalLM(config).save_pretrained(tmp_path / "model")
    load_tokenizer("bytes").save(tmp_path / "model")
    lines = [json.dumps({"text": f"Document {i} says {i * i}. " * (3 + i)}) for i in range(5)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    pairs = [{"good": f"{i} cats sleep", "bad": f"{'many' * i} cats sleeps", "set": "s"} for i in range(7)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    done = in_two(29_541, _evaluations, str(tmp_path), str(tmp_path / "two"))
    assert [one.returncode for one in done] == [0, 0], done
    assert "written" not in done[1].stdout
    with Started(_evaluations, str(tmp_path), str(tmp_path / "one")) as running:
        single = running.wait()
    assert single.returncode == 0, single
    assert done[0].stdout.replace("two/", "one/") == single.stdout
    for path in (tmp_path / "one").iterdir():
        one, two = (json.loads((tmp_path / name / path.name).read_text()) for name in ("one", "two"))
        assert one["rows"] == two["rows"], path.name
        assert one["kind"] == {"ppl": "perplexity"}.get(path.stem, path.stem)
