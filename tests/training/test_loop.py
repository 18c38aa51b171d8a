"""Training: killed, interrupted, resumed or spread over processes, the losses are the same."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

import farspan.training.loop as loop
from farspan import FarspanForCausalLM, modeling_farspan
from farspan.training import TrainConfig, TrainingStoppedError, train
from farspan.training.checkpoint import checkpoints
from farspan.training.loop import interruption
from farspan.utils import LOCK, lock
from tests.command_line import called
from tests.helpers import losses
from tests.processes import Started, in_two
from tests.training.runs import PowerCutError, config, cut_at, run_quietly, run_sharded, settings, tokens


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tokens(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(source: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("whole")
    train(config(source), out)
    return out


def weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


def test_training_learns_and_leaves_a_model_and_its_records(whole: Path) -> None:
    assert {p.name for p in whole.iterdir()} == {"metrics.jsonl", "model", "tensorboard", LOCK}
    assert not {"optimizer.safetensors", "checksums.json"} & {p.name for p in (whole / "model").iterdir()}
    assert FarspanForCausalLM.from_pretrained(whole / "model").config.train_length == 16
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(12))
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
    assert rows[0]["lr"] == pytest.approx(1e-7)
    assert rows[1]["lr"] == pytest.approx(1e-2)
    assert rows[-1]["lr"] < rows[1]["lr"]
    assert all(row["grad_norm"] > 0 for row in rows)
    trainer = json.loads((whole / "model" / "trainer.json").read_text())
    assert trainer["tokens_per_second"] > 0
    assert trainer["seconds"] > 0


def test_tensorboard_reads_the_events(whole: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(whole / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(12))
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses(whole))
    assert set(events.Tags()["scalars"]) == {"loss", "lr", "grad_norm"}


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("config.json", "{}"),
        ("manifest.json", "{}"),
        ("model/config.json", "{}"),
        ("metrics.jsonl", '{"epoch": 1, "loss": 2}'),
        ("metrics.jsonl", '{"step": 5, "acc": 0.9}'),
        ("metrics.jsonl", '{"step": null, "loss": 1, "lr": 1, "grad_norm": 1}'),
    ],
)
def test_a_folder_of_something_else_is_kept(name: str, held: str, source: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(held)
    with pytest.raises(ValueError, match=r"out must be a new folder or one of a training run, got .*; choose another"):
        train(config(source), tmp_path)
    assert {p for p in tmp_path.rglob("*") if p.is_file()} - {tmp_path / LOCK} == {path}
    assert path.read_text() == held
    with pytest.raises(ValueError, match=r"out must be a new folder or one of a training run, got '/'"):
        train(config(source), "/")


def test_two_processes_do_not_share_a_folder(source: str, tmp_path: Path) -> None:
    with lock(tmp_path / "run"), pytest.raises(ValueError, match=r"another process works in .*run'; wait for it"):
        train(config(source), tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__passkey_share": 0.01}, r"data.length must be at least \d+ tokens for a passkey text .* got 16"),
        ({"data__sources": {"nowhere": 1.0}}, "manifest.json"),  # and nobody asks a hub for it
        ({"model__options": {"hidden_size": "x"}}, "expected int, got str"),
        ({"model__options": {"vocab_size": 10}}, "vocab_size must be at least the 257 tokens of the data, got 10"),
        ({"model__options": {"attention": "alibi"}}, "options must not hold attention, which has a key of its own"),
        ({"model__options": {"norm_eps": -1.0}}, "rms_norm_eps must be .* got -1.0"),
        ({"model__attention": [3]}, "attention must be a name or a mapping for each layer, got 3"),
    ],
)
def test_what_cannot_be_trained_leaves_nothing(changes: dict, message: str, source: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        train(config(source, **changes), tmp_path / "some" / "run")
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_flipped_bit_in_the_data_is_named_before_training(tmp_path: Path) -> None:
    shard = Path(tokens(tmp_path)) / "train-00000.bin"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ValueError, match=r"^shard .*train-00000\.bin must have sha256 .*, got .*; delete .*$"):
        train(config(str(shard.parent)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_not_repeated_and_its_folder_holds_one_run(whole: Path, source: str, tmp_path: Path) -> None:
    before = (whole / "model" / "model.safetensors").stat().st_mtime_ns
    assert train(config(source, run__compile=True), whole) == whole / "model"
    assert (whole / "model" / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match=r"steps = 12, got 13; optimizer.clip = 1.0, got 2.0; keep it or use another"):
        train(config(source, optimizer__steps=13, optimizer__clip=2.0), whole)
    with pytest.raises(ValueError, match=r"this run in '.*' began with run.seed = 0, got 1"):
        train(config(source, run__seed=1), whole)
    (tmp_path / "model").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "model" / "trainer.json").write_text('{"config": {}}')
    with pytest.raises(ValueError, match=r"must hold the trainer.json of a run, got none or a damaged one"):
        train(config(source), tmp_path)


def test_a_run_stopped_at_any_step_goes_on_to_the_same_weights(
    whole: Path, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it is cut while it finishes."""
    with cut_at(3, 10, 18) as asked:
        for _ in range(3):
            with pytest.raises(PowerCutError):
                train(config(source), tmp_path)
        assert asked == [*range(4), *range(7), *range(4, 12)]
        monkeypatch.setattr(loop, "clean", lambda folder: (_ for _ in ()).throw(PowerCutError()))
        with pytest.raises(PowerCutError):
            train(config(source), tmp_path)
    monkeypatch.undo()
    assert train(config(source), tmp_path) == tmp_path / "model"
    assert losses(tmp_path) == losses(whole)
    assert weights(tmp_path) == weights(whole)
    assert not (tmp_path / "model" / "optimizer.safetensors").exists()
    assert not checkpoints(tmp_path)


@pytest.mark.parametrize(
    ("presses", "stopped", "kept"),
    [
        (1, "stopped at step 6; the same command continues", 6),
        (2, "stopped at once; the same command continues from step 4", 4),
    ],
)
def test_ctrl_c_stops_after_the_step_and_the_run_goes_on(
    presses: int, stopped: str, kept: int, whole: Path, source: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    advance = loop._Run.advance

    def press(self: loop._Run, step: int) -> None:
        advance(self, step)
        if step == 5:
            for _ in range(presses):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)  # two at once reach Python as one

    with patch.object(loop._Run, "advance", press), pytest.raises(KeyboardInterrupt, match=stopped):
        train(config(source), tmp_path)
    assert "stopping after this training step; Ctrl-C again stops sooner, back at step 4\n" in capfd.readouterr().err
    assert checkpoints(tmp_path)[-1].name == f"checkpoint-{kept:08d}"
    train(config(source), tmp_path)
    assert losses(tmp_path) == losses(whole)


def test_ctrl_c_while_the_last_checkpoint_is_saved_stops_too(whole: Path, source: str, tmp_path: Path) -> None:
    """Or the next stage of a recipe would begin."""
    save = loop._Run.save

    def press(self: loop._Run) -> None:
        save(self)
        if self.step == 12:
            os.kill(os.getpid(), signal.SIGINT)

    with patch.object(loop._Run, "save", press), pytest.raises(KeyboardInterrupt, match="stopped at step 12; the same"):
        train(config(source), tmp_path)
    train(config(source), tmp_path)
    assert weights(tmp_path) == weights(whole)


def test_the_handler_of_ctrl_c_is_given_back_and_other_threads_have_none() -> None:
    before = signal.getsignal(signal.SIGINT)

    def ask() -> bool:
        with interruption(lambda: 0) as interrupted:
            return interrupted()

    assert not ask()
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(ask).result()
    assert signal.getsignal(signal.SIGINT) == before


def test_two_processes_equal_one(whole: Path, source: str, tmp_path: Path) -> None:
    done = in_two(29511, run_quietly, str(tmp_path), source)
    assert [(one.returncode, one.stdout) for one in done] == [(0, "2\n"), (0, "2\n")], done
    assert losses(tmp_path) == pytest.approx(losses(whole), abs=1e-5)


def test_two_processes_without_the_lock_both_say_so(source: str, tmp_path: Path) -> None:
    with lock(tmp_path):
        done = in_two(29513, run_quietly, str(tmp_path), source)
    assert all("another process works in" in one.stderr and one.returncode for one in done)


def test_a_sharded_run_goes_on_with_another_number_of_processes(whole: Path, source: str, tmp_path: Path) -> None:
    """FSDP2 in two processes, then one process without, then two again."""
    first = in_two(29512, run_sharded, str(tmp_path), source, "stop=5")
    assert [(one.returncode, one.stdout) for one in first] == [(0, "FSDPNextToken 2\n")] * 2, first
    with Started(run_quietly, str(tmp_path), source, "stop=9") as alone:
        assert alone.wait().stdout == "NextToken 1\n"
    last = in_two(29514, run_sharded, str(tmp_path), source)
    assert [(one.returncode, one.stdout) for one in last] == [(0, "2\n")] * 2, last
    assert losses(tmp_path) == pytest.approx(losses(whole), abs=1e-5)
    ours, theirs = (load_file(path / "model" / "model.safetensors") for path in (tmp_path, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[key], theirs[key], atol=1e-5) for key in ours)


@pytest.mark.parametrize("what", ["loss", "norm"])
def test_what_is_not_finite_stops_the_run_with_the_last_good_checkpoint(
    what: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of a step may still be fine while its gradient is not, and the weights after it would not be."""
    advance = loop._Run.advance

    def poison(self: loop._Run, step: int) -> None:
        advance(self, step)
        if step == 5:
            (self.losses if what == "loss" else self.norms)[-1].fill_(float("nan" if what == "loss" else "inf"))

    monkeypatch.setattr(loop._Run, "advance", poison)
    with pytest.raises(TrainingStoppedError, match=r"(loss is nan|norm inf) .*step 5; the last good .*00000004"):
        train(config(source), tmp_path / "run")
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["checkpoint-00000004"]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(settings(source)))
    status, _, said = called("train", file, "--out", tmp_path / "again")
    assert status == 2
    assert "at step 5; the last good checkpoint is" in said.splitlines()[-1]  # a slow computer logs progress before it


@pytest.mark.parametrize("changes", [{"run__gradient_checkpointing": True}, {"optimizer__accumulation": 4}], ids=str)
def test_how_a_step_is_computed_changes_only_rounding(changes: dict, whole: Path, source: str, tmp_path: Path) -> None:
    train(config(source, **changes), tmp_path)
    assert losses(tmp_path) == pytest.approx(losses(whole), abs=1e-4)


BAD = {
    "[optimiser]\nsteps = 5": "did you mean 'optimizer'",
    "[optimizer]\npeek_lr = 5.0": r"configuration key optimizer.peek_lr .*did you mean 'peak_lr'",
    "[data]\nlength = 16": "data.sources is empty; name token folders",
    "[data]\nsources = { a = 1.0 }\npasskey_share = 0.01\nretrieval_share = 0.01": "passkey_share must be 0 with",
    "[data]\nsources = { a = -1.0 }": "data.sources.a must be greater than 0, got -1.0",
    "[data]\nsources = { a = 'x' }": "data.sources.a must be a valid number, got 'x'",
    "[data\n": "is not valid TOML",
    **{
        f"[data]\nsources = {{ a = 1.0 }}\n[{section}]\n{line}": rf"{section}\.{name}"
        for section, lines in {
            "optimizer": ["steps = 'many'", "steps = 0", "steps = true", "betas = [0.9]", "betas = [0.9, 1.0]"]
            + ["clip = -1.0", "clip = nan", "weight_decay = -0.1", "warmup_share = 5.0"]
            + [f"{rate}_lr = {bad}" for rate in ("peak", "start", "end") for bad in ("nan", "inf", "-1e-4", "1e300")],
            "run": ["seed = -1", "precision = 'fp8'", "checkpoint_every = 0"],
        }.items()
        for line in lines
        for name in [line.split(" ")[0]]
    },
    **{
        f"[data]\n{line}\nsources = {{ a = 1.0 }}": f"data.{line.split(' ')[0]} must"
        for line in ("passkey_share = 0.5", "retrieval_share = 0.5", "length = 1", "batch_size = 0", "batch_size = 3")
    },
}


@pytest.mark.parametrize(("toml", "message"), BAD.items(), ids=range(len(BAD)))
def test_bad_configurations_get_one_clear_line(toml: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(toml)
    with pytest.raises(ValueError, match=message) as raised:
        TrainConfig.load(path)
    assert "\n" not in str(raised.value)


def test_a_configuration_made_in_python_is_checked_too(source: str, tmp_path: Path) -> None:
    good = config(source)
    bad = replace(good, optimizer=replace(good.optimizer, end_lr=float("nan")))
    with pytest.raises(ValueError, match=r"optimizer.end_lr must be a finite number"):
        train(bad, tmp_path / "run")


def test_shipped_configurations_are_accelerates() -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    status, folder, _ = called("launch-path")
    assert status == 0
    loaded = {path.stem: load_config_from_file(str(path)) for path in Path(folder.strip()).glob("*.yaml")}
    assert loaded.keys() == {"one-node", "several-nodes", "fsdp2"}
    sharding = loaded["fsdp2"].fsdp_config
    assert sharding["fsdp_version"] == 2
    assert hasattr(modeling_farspan, sharding["fsdp_transformer_layer_cls_to_wrap"])
