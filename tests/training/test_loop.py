"""Training: killed, interrupted, resumed or spread over processes, the losses are the same."""

import json
import multiprocessing
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import farspan.training.loop as loop
from farspan import FarspanForCausalLM
from farspan.training import TrainConfig, TrainingStoppedError, pretraining_job, run, train
from farspan.training.checkpoint import checkpoints
from tests.helpers import losses
from tests.processes import Started, in_two, start_server
from tests.training import sharded
from tests.training.runs import config, run_out_of_room, run_quietly, run_with_others, tokens


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tokens(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(source: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("whole")
    train(config(source), out)
    return out


def test_training_learns_and_leaves_a_model_that_loads(whole: Path) -> None:
    curve = losses(whole)
    assert len(curve) == 12
    assert curve[-1] < curve[0] - 0.5
    model = FarspanForCausalLM.from_pretrained(whole / "model")
    assert model.config.train_length == 16
    assert {p.name for p in whole.iterdir()} - {"tensorboard"} == {"metrics.jsonl", "model"}
    assert not list(whole.rglob("*.bin")) + list(whole.rglob("*.pt"))


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("config.json", "{}"),
        ("manifest.json", "{}"),
        ("model/config.json", "{}"),
        ("metrics.jsonl", '{"epoch": 1, "loss": 2}'),
        ("metrics.jsonl", '{"step": 5, "acc": 1}'),
    ],
)
def test_a_folder_of_something_else_is_refused_and_kept(name: str, held: str, source: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(held)
    with pytest.raises(ValueError, match=r"out must be a new folder or one of a run, got .*; choose another"):
        train(config(source), tmp_path)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]
    assert path.read_text() == held


def test_what_cannot_be_trained_on_is_refused_before_the_first_step(source: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(ValueError, match=r"data.length must be at least \d+ tokens for a passkey text .* got 16"):
        train(config(source, data__passkey_share=0.01), out)
    with pytest.raises(ValueError, match=r"manifest.json"):  # and nobody asks a hub for it
        train(config(str(tmp_path / "nowhere")), out)
    assert not out.exists()


def test_a_finished_run_is_not_repeated(whole: Path, source: str) -> None:
    before = (whole / "model" / "model.safetensors").stat().st_mtime_ns
    assert train(config(source), whole) == whole / "model"
    assert (whole / "model" / "model.safetensors").stat().st_mtime_ns == before


def test_a_run_stopped_at_any_step_goes_on_to_the_same_losses(
    whole: Path, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = loop._Run.advance

    def crash(self, step: int) -> None:
        if step in (3, 6, 11) and step not in crashed:
            crashed.add(step)
            raise RuntimeError("power cut")
        original(self, step)

    crashed: set[int] = set()
    monkeypatch.setattr(loop._Run, "advance", crash)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="power cut"):
            train(config(source), tmp_path)
    train(config(source), tmp_path)
    assert crashed == {3, 6, 11}
    assert losses(tmp_path) == losses(whole)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == (
        whole / "model" / "model.safetensors"
    ).read_bytes()


def newest(folder: Path) -> int:
    """The step of the last checkpoint, 0 before the first."""
    return max((int(path.name.removeprefix("checkpoint-")) for path in checkpoints(folder)), default=0)


@pytest.mark.slow
def test_kill_9_at_20_random_moments_changes_nothing(source: str, tmp_path: Path) -> None:
    """Real processes, really killed, at moments spread over start-up, steps and checkpoint writing."""
    start_server()  # children start at once, not after seconds of imports
    context = multiprocessing.get_context("forkserver")
    changes = ("optimizer__steps=500", "run__checkpoint_every=5")

    def child(out: str) -> multiprocessing.process.BaseProcess:
        process = context.Process(target=run_quietly, args=(str(tmp_path / out), source, *changes))
        process.start()
        return process

    whole = child("whole")
    whole.join(300)
    assert whole.exitcode == 0
    moments, reached = random.Random(0), set()
    for _ in range(20):
        before, further = newest(tmp_path / "killed"), moments.choice([0, 0, 1, 2, 4])
        longest = 0.03 if further else 0.4
        if before > 300:  # near the end only while it starts, so that no run ends before it is killed
            further, longest = 0, 0.1
        process = child("killed")
        while newest(tmp_path / "killed") < before + 5 * further and process.is_alive():
            time.sleep(0.002)
        time.sleep(moments.uniform(0.0, longest))  # while it starts, or some checkpoints later
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, "the run ended before it could be killed: give it more steps"
        reached.add(newest(tmp_path / "killed"))
    last = child("killed")
    last.join(300)
    assert last.exitcode == 0
    assert len(reached) >= 3, "the kills must fall into different parts of the run"
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


@pytest.mark.parametrize(
    ("presses", "stopped", "kept"),
    [
        (1, "stopped at step 6; the same command continues", 6),
        (2, "stopped at once; the same command continues from step 4", 4),
    ],
)
def test_ctrl_c_is_answered_within_the_step_and_the_run_goes_on(
    presses: int,
    stopped: str,
    kept: int,
    whole: Path,
    source: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    original, said = loop._Run.advance, ""

    def press(self: loop._Run, step: int) -> None:
        nonlocal said
        original(self, step)
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)
            deadline = time.monotonic() + 30
            while not said and time.monotonic() < deadline:
                time.sleep(0.001)
                said = capsys.readouterr().err
            for _ in range(1, presses):
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(loop._Run, "advance", press)
    with pytest.raises(KeyboardInterrupt, match=stopped):
        train(config(source), tmp_path)
    wanted = "stopping after this training step; Ctrl-C again stops sooner, back at step 4\n"
    assert said + capsys.readouterr().err == wanted
    assert checkpoints(tmp_path)[-1].name == f"checkpoint-{kept:08d}"
    monkeypatch.undo()
    train(config(source), tmp_path)
    assert losses(tmp_path) == losses(whole)


def test_ctrl_c_while_the_last_checkpoint_is_saved_is_obeyed(
    whole: Path, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the next stage of a recipe would begin."""
    original, steps = loop._Run.save, len(losses(whole))

    def press(self: loop._Run) -> None:
        original(self)
        if self.step == steps:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(loop._Run, "save", press)
    with pytest.raises(KeyboardInterrupt, match=f"stopped at step {steps}; the same command continues"):
        train(config(source), tmp_path)
    monkeypatch.undo()
    train(config(source), tmp_path)
    assert losses(tmp_path) == losses(whole)


def test_two_processes_equal_one(whole: Path, source: str, tmp_path: Path) -> None:
    done = in_two(29511, run_with_others, str(tmp_path), source)
    assert [(one.returncode, one.stdout) for one in done] == [(0, "2\n"), (0, "2\n")], done
    difference = max(abs(a - b) for a, b in zip(losses(tmp_path), losses(whole), strict=True))
    assert difference <= 1e-5


def test_a_checkpoint_of_a_sharded_model_is_that_of_the_whole_model(tmp_path: Path) -> None:
    done = in_two(29512, sharded.main, tmp_path / "sharded")
    assert [one.returncode for one in done] == [0, 0], done
    expected = sharded.losses(tmp_path / "whole", sharded=False)
    assert max(abs(float(a) - b) for a, b in zip(done[0].stdout.split(), expected, strict=True)) <= 1e-5
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (load_file(tmp_path / kind / "checkpoint-00000006" / name) for kind in ("sharded", "whole"))
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[key], theirs[key], atol=1e-5) for key in ours)


def test_a_loss_that_is_not_a_number_stops_with_the_last_good_checkpoint(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import farspan.training.pretraining as pretraining

    original = pretraining.linear_cross_entropy
    calls: list[int] = []

    def poisoned(*arguments: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return original(*arguments) * (float("nan") if len(calls) > 2 * 9 else 1.0)

    monkeypatch.setattr(pretraining, "linear_cross_entropy", poisoned)
    with pytest.raises(TrainingStoppedError, match=r"loss is nan .* at step 9; the last good checkpoint is .*00000008"):
        train(config(source), tmp_path)


def test_a_bad_gradient_is_never_saved(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of the step is still fine; its gradient is not, and the weights after it would not be."""
    original = loop._Run.advance

    def overflow(self, step: int) -> None:
        original(self, step)
        if step == 7:
            self.norms[-1] = torch.tensor(float("inf"))

    monkeypatch.setattr(loop._Run, "advance", overflow)
    with pytest.raises(TrainingStoppedError, match=r"gradient norm inf at step 7; .*00000004"):
        train(config(source), tmp_path)
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint-00000004"]


def test_a_run_killed_while_finishing_is_finished_by_the_next_call(
    whole: Path, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(folder: Path) -> None:
        raise RuntimeError("power cut")

    monkeypatch.setattr(loop, "_clean", cut)
    with pytest.raises(RuntimeError, match="power cut"):
        train(config(source), tmp_path)
    monkeypatch.undo()
    assert train(config(source), tmp_path) == tmp_path / "model"
    assert losses(tmp_path) == losses(whole)
    assert not (tmp_path / "model" / "optimizer.safetensors").exists()
    assert not checkpoints(tmp_path)


def test_a_really_full_disk_keeps_the_last_checkpoint(source: str, tmp_path: Path) -> None:
    """A limit on file sizes stops safetensors itself, whose error is of its own kind."""
    with Started(run_out_of_room, str(tmp_path), source) as running:
        done = running.wait()
    assert done.returncode == 1
    assert "could not be written" in done.stderr
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint-00000004"]


def test_a_batch_that_processes_and_pieces_cannot_share_is_refused(source: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"batch_size must be a multiple of optimizer.accumulation = 3, got 8"):
        train(config(source, optimizer__accumulation=3), tmp_path)


def test_a_full_disk_keeps_the_last_checkpoint(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import farspan.training.checkpoint as room

    original = room.save_file

    def full(tensors: dict, path: Path) -> None:
        if "00000008" in str(path):
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        original(tensors, path)

    monkeypatch.setattr(room, "save_file", full)
    with pytest.raises(OSError, match=r"No space left on device.*last good one is .*00000004.*free some space"):
        train(config(source), tmp_path)
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint-00000004"]
    assert not list(tmp_path.glob("*.part"))


def test_a_folder_holds_one_run(whole: Path, source: str) -> None:
    with pytest.raises(ValueError, match=r"optimizer.steps is 13, but .* was started with 12; choose another --out"):
        train(config(source, optimizer__steps=13), whole)


@pytest.mark.parametrize("changes", [{"run__gradient_checkpointing": True}, {"optimizer__accumulation": 4}], ids=str)
def test_how_a_step_is_computed_changes_only_rounding(changes: dict, whole: Path, source: str, tmp_path: Path) -> None:
    train(config(source, **changes), tmp_path)
    assert max(abs(a - b) for a, b in zip(losses(tmp_path), losses(whole), strict=True)) <= 1e-4


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[optimiser]\nsteps = 5", "did you mean 'optimizer'"),
        ("[optimizer]\npeek_lr = 5.0", r"configuration key optimizer.peek_lr .*did you mean 'peak_lr'"),
        ("[optimizer]\nsteps = 'many'", "optimizer.steps must be int, got 'many'"),
        ("[data]\nlength = 16", "data.sources is empty; name token folders"),
        ("[data]\nsources = { a = 1.0 }\npasskey_share = 0.5", "passkey_share must lie in 0 … 0.05, got 0.5"),
        ("[data]\nsources = { a = -1.0 }", "weights > 0"),
        ("[data\n", "is not valid TOML"),
        ("[data]\nsources = { a = 1.0 }\n[run]\ncheckpoint_every = 0", "checkpoint_every must be at least 1, got 0"),
        ("[data]\nsources = { a = 1.0 }\n[optimizer]\nbetas = [0.9]", "betas must be two numbers"),
        ("[data]\nsources = { a = 'x' }", "data.sources.a must be float, got 'x'"),
        ("[data]\nsources = { a = 1.0 }\n[optimizer]\nclip = -1.0", "optimizer.clip must be above 0, got -1.0"),
    ],
)
def test_bad_configurations_are_refused(toml: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(toml)
    with pytest.raises(ValueError, match=message):
        TrainConfig.load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__options": {"hidden_size": "x"}}, "options of preset 'tiny' must be .* expected int, got str"),
        ({"model__attention": [3]}, "attention must be a name or a mapping for each layer, got 3"),
    ],
)
def test_a_model_that_cannot_be_is_refused_in_one_line(
    changes: dict, message: str, source: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        train(config(source, **changes), tmp_path)
    assert "\n" not in str(refused.value)


def test_metrics_hold_the_schedule(whole: Path) -> None:
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(12))
    assert rows[0]["lr"] == pytest.approx(1e-7)
    assert rows[1]["lr"] == pytest.approx(1e-2)
    assert rows[-1]["lr"] < rows[1]["lr"]
    assert all(row["grad_norm"] > 0 for row in rows)


def test_frozen_parameters_stay_what_they_were_and_belong_to_the_checkpoint(source: str, tmp_path: Path) -> None:
    job = pretraining_job(config(source))

    def frozen() -> FarspanForCausalLM:
        model = job.start()
        model.model.embed_tokens.requires_grad_(False)
        return model

    torch.manual_seed(0)
    before = job.start().state_dict()
    model = FarspanForCausalLM.from_pretrained(run(replace(job, start=frozen), tmp_path))
    after = model.state_dict()
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    assert not torch.equal(before["model.layers.0.mlp.up_proj.weight"], after["model.layers.0.mlp.up_proj.weight"])
