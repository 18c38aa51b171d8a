"""Each task trains, is counted, and goes on after an interruption as if there had been none."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from farspan import FarspanForMaskedLM, FarspanForSequenceClassification
from farspan.tasks import TASKS, make_task
from farspan.training import run
from tests.helpers import losses
from tests.tasks.small import MODEL, material, settings, task


def quiet(done: float, total: float | None, text: str = "", *, phase: str = "") -> None:
    assert total
    assert 0 <= done <= total
    assert text == phase in ("valid set", "test set")


@pytest.mark.parametrize(
    ("name", "variant"), [*((name, "cosformer") for name in TASKS), *((n, "linear-coca") for n in ("lm", "mqar"))]
)
def test_loss_falls_and_the_test_set_is_counted(name: str, variant: str, tmp_path: Path) -> None:
    made = task(name, tmp_path, peak_lr=3e-2 if name == "finetuning" else 1e-2)
    model = made.train(variant, 0, tmp_path / "run")
    curve = losses(tmp_path / "run")
    if name != "pathfinder":  # a dozen steps do not follow a path
        assert np.mean(curve[-4:]) < np.mean(curve[:4]) - 0.05
    row = made.score(model, "cpu", progress=quiet)
    if name == "lm":
        assert row["ppl"] < 200
        assert row["tokens"] > 300
    else:
        low, high = row["ci95"]
        assert low <= row["correct"] / row["cases"] <= high
        assert row["valid"]["cases"] >= 8
        assert row["cases"] == {"mqar": 50 * 2, "text": 30, "finetuning": 30, "pathfinder": 16}.get(name, 50)


@pytest.mark.parametrize("name", ["listops", "mqar", "finetuning"])
def test_a_run_cut_short_continues_to_the_same_weights(name: str, tmp_path: Path) -> None:
    made = task(name, tmp_path)
    whole = made.train("cosformer-plain", 1, tmp_path / "whole")
    job = made.job("cosformer-plain", 1)
    if name == "finetuning":
        (tmp_path / "cut").mkdir()
        shutil.copytree(tmp_path / "whole" / "pretraining", tmp_path / "cut" / "pretraining")
        (tmp_path / "cut" / "metrics.jsonl").touch()
        job = replace(job, start=lambda: made.continued(tmp_path / "cut" / "pretraining" / "model"))
    job = replace(job, run=replace(job.run, checkpoint_every=10))

    def interrupt(done: float, total: float | None, text: str = "", *, phase: str = "") -> None:
        if done > 10:  # the checkpoint of step 10 has been written by then
            raise InterruptedError

    with pytest.raises(InterruptedError):
        run(job, tmp_path / "cut", progress=interrupt)
    continued = made.train("cosformer-plain", 1, tmp_path / "cut")
    assert losses(tmp_path / "whole") == losses(tmp_path / "cut")
    assert (whole / "model.safetensors").read_bytes() == (continued / "model.safetensors").read_bytes()


def test_recall_is_solved_by_softmax_attention(tmp_path: Path) -> None:
    """Two layers, as induction needs."""
    options = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 1}
    changes = {"options": {**options, "initializer_range": 0.1}, "steps": 230, "train": 8000, "batch_size": 64}
    changes |= {"peak_lr": 3e-3}
    made = task("mqar", tmp_path, **changes)
    row = made.score(made.train("rope", 0, tmp_path / "run"), "cpu", progress=quiet)
    assert row["accuracy"] >= 0.95


def test_fine_tuning_starts_from_the_pretrained_encoder_and_its_positions(tmp_path: Path) -> None:
    made = task("finetuning", tmp_path, steps=1, options={**MODEL, "learned_positions": 32})
    model = made.train("cosformer", 0, tmp_path / "run")
    pretrained = FarspanForMaskedLM.from_pretrained(tmp_path / "run" / "pretraining" / "model").state_dict()
    started = made.continued(tmp_path / "run" / "pretraining" / "model").state_dict()
    shared = [name for name in pretrained if name.startswith("model.")]
    assert len(shared) > 8
    assert all(torch.equal(pretrained[name], started[name]) for name in shared)
    assert started["score.weight"].shape == (2, 32)
    learned = FarspanForSequenceClassification.from_pretrained(model).model.embed_positions.weight
    assert not torch.equal(learned, started["model.embed_positions.weight"])


def test_variants_differ_in_their_attention_alone(tmp_path: Path) -> None:
    made = make_task("listops", settings("listops"), material(tmp_path))
    models = {variant: made.start(variant) for variant in ("rope", "cosformer", "cosformer-plain")}
    assert all(isinstance(model, FarspanForSequenceClassification) for model in models.values())
    assert len({model.num_parameters() for model in models.values()}) == 1
    assert not any(model.config.causal for model in models.values())
    configurations = [made.config(variant).to_dict() for variant in ("rope", "linear-coca")]
    assert {key for key, value in configurations[0].items() if configurations[1][key] != value} == {"attention"}
    ids = torch.randint(1, 16, (2, 24))
    outputs = []
    for variant, model in models.items():
        model.load_state_dict(models["rope"].state_dict())
        assert model(ids).logits.shape == (2, 10), variant
        outputs.append(model(ids).logits)
    assert not torch.allclose(outputs[0], outputs[1])
    assert not torch.allclose(outputs[1], outputs[2])


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("listops", {"length": 30}, "tasks.listops.length must be 24 with this generator, got 30"),
        ("listops", {"generator": {"max_dept": 3}}, "generator.max_dept must be one of .* did you mean 'max_depth'"),
        (
            "listops",
            {"generator": {"max_depth": 2, "max_args": 2, "min_length": 0, "max_length": 24}, "train": 600},
            "the generator must have 690 different examples, got (3|4)[0-9]{2}; ask for fewer",
        ),
        (
            "listops",
            {"generator": {"max_depth": 3, "min_length": 0, "max_length": 3}, "length": 3},
            "must leave more expressions, got 0 and 3, where 200,000 tries after 10 found no other",
        ),
        ("finetuning", {"pretraining_steps": 0}, "pretraining_steps must be at least 1, got 0; without pre-training"),
    ],
)
def test_what_cannot_be_made_gets_one_line(name: str, changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        task(name, tmp_path, **changes)


@pytest.mark.parametrize(
    ("name", "learned", "message"),
    [
        ("listops", 23, "tasks.listops.options.learned_positions must be 0 or at least the length 24, got 23; leave"),
        ("finetuning", 31, "learned_positions must be 0 or at least the length 32, got 31"),
        ("mqar", 16, "tasks.mqar.options.learned_positions must be 0 for a causal model, got 16; leave it out"),
        ("lm", 32, "tasks.lm.options.learned_positions must be 0 for a causal model, got 32"),
    ],
)
def test_positions_that_a_model_cannot_learn_are_found_before_any_work(
    name: str, learned: int, message: str, tmp_path: Path
) -> None:
    made = make_task(name, settings(name, options={**MODEL, "learned_positions": learned}), material(tmp_path))
    with pytest.raises(ValueError, match=message):
        made.check(["cosformer"])
