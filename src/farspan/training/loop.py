"""One plain training loop on Accelerate: one process, several GPUs and several nodes are the same code.

The batch of a step is a pure function of seed and step, there is no dropout, and the learning rate follows from the
step. So a checkpoint is weights, moments and a step number, and a run that was killed goes on to the same losses, bit
for bit.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from farspan.errors import require
from farspan.files import check_folder
from farspan.training import checkpoint
from farspan.training.interruption import interruption
from farspan.training.job import Job
from farspan.training.metrics import Metrics
from farspan.training.optimizer import compile_blocks, make_optimizer
from farspan.training.schedule import learning_rate
from farspan.training.speed import flops_per_token, matmul_peak

FLUSH_EVERY = 10
"""Steps between looks at the loss: each look waits for the device."""


class TrainingStoppedError(RuntimeError):
    """The run cannot go on; its last good checkpoint is kept."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands, for a progress line."""

    step: int
    steps: int
    loss: float
    tokens_per_second: float
    """Since the first look, so that compilation does not count."""
    mfu: float
    """Share of the matrix peak measured at the start."""
    seconds: float
    """All calls of the run together."""


def run(job: Job, out: str | os.PathLike[str], *, report: Callable[[Progress], None] | None = None) -> Path:
    """Do a job, or go on where an earlier call stopped; return the folder of the finished model.

    Args:
        job: what is trained.
        out: the folder of the run: checkpoints, ``metrics.jsonl``, TensorBoard events, and at the end ``model``.
        report: called every few steps.
    """
    folder = Path(out)
    _check_folder(folder)
    if (folder / "model").is_dir():
        _check_same_run(json.loads((folder / "model" / "trainer.json").read_text())["config"], job, folder)
        _clean(folder)
        return folder / "model"
    disable_progress_bar()  # transformers would draw one for every checkpoint
    accelerator = Accelerator(
        mixed_precision="bf16" if _bf16(job.run.precision) else "no",
        gradient_accumulation_steps=job.optimizer.accumulation,
        cpu=not torch.cuda.is_available(),  # several processes on CPUs form a group only when told so
    )
    here, steps = _Run(job, folder, accelerator), job.optimizer.steps
    with interruption(partial(checkpoint.last_step, folder), say=accelerator.is_main_process) as interrupted:
        for step in range(here.step, steps):
            here.advance(step)
            last = step + 1 == steps
            if last or (step + 1) % FLUSH_EVERY == 0:
                progress = here.flush()
                if report is not None and accelerator.is_main_process:
                    report(progress)
            stop = here.any_process(interrupted())
            if last or stop or (step + 1) % job.run.checkpoint_every == 0:
                here.flush()
                here.save()
            if stop:
                raise KeyboardInterrupt(f"stopped at step {step + 1}; the same command continues")
        if here.any_process(interrupted()):  # while the last checkpoint was saved: whatever comes next should not begin
            raise KeyboardInterrupt(f"stopped at step {steps}; the same command continues")
    return here.finish()


def _check_folder(folder: Path) -> None:
    """Refuse the folder of a model, of tokens, or of a run of another command."""
    check_folder(folder)
    model = folder / "model"
    strange = [name for name in ("config.json", "manifest.json") if (folder / name).exists()]
    strange += ["model, which no training made"] if model.is_dir() and not (model / "trainer.json").exists() else []
    require(
        not strange,
        f"out must be a new folder or one of a run, got {str(folder)!r} with {', '.join(strange)}; choose another",
    )


class _Run:
    """The moving parts of one run."""

    def __init__(self, job: Job, folder: Path, accelerator: Accelerator) -> None:
        self.job, self.folder, self.accelerator = job, folder, accelerator
        pieces = job.optimizer.accumulation * accelerator.num_processes
        require(
            job.batch_size % pieces == 0,
            f"data.batch_size must be a multiple of accumulation × processes = {pieces}, got {job.batch_size}",
        )
        self.batches = job.batches()
        earlier = checkpoint.checkpoints(folder)
        torch.manual_seed(job.run.seed)
        model = job.load(earlier[-1]) if earlier else job.start()
        if job.run.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        if job.run.compile:
            compile_blocks(model)
        self.model = model.train()
        self.flops = flops_per_token(model, job.tokens_per_row)
        optimizer = make_optimizer(model, job.optimizer, accelerator.device)
        self.network, self.optimizer = accelerator.prepare(job.objective(model), optimizer)
        self.step, self.last_loss, self.earlier_seconds = 0, math.nan, 0.0
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        if earlier:
            state = checkpoint.load_optimizer(earlier[-1], self.network, self._inner_optimizer())
            _check_same_run(state["config"], job, folder)
            self.step, self.earlier_seconds = state["step"], state.get("seconds", 0.0)
        self.metrics = Metrics(folder, self.step, accelerator.is_main_process)
        dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
        self.peak = matmul_peak(accelerator.device, dtype) * accelerator.num_processes
        self.started = time.perf_counter()
        self.clock = (self.step, self.started)
        self.looks = 0

    def _inner_optimizer(self) -> torch.optim.Optimizer:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def advance(self, step: int) -> None:
        """One optimizer step on the batch of this step."""
        section, accelerator = self.job.optimizer, self.accelerator
        rows = self.batches.batch(step, accelerator.process_index, accelerator.num_processes)
        rows = rows.to(accelerator.device, non_blocking=True)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, section)
        losses = []
        for ids in rows.chunk(section.accumulation):
            with accelerator.accumulate(self.network):
                loss = self.network(ids)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    self.norms.append(accelerator.clip_grad_norm_(self.network.parameters(), section.clip))
                self.optimizer.step()
                self.optimizer.zero_grad()
                losses.append(loss.detach())
        self.losses.append(torch.stack(losses).mean())
        self.step = step + 1

    def flush(self) -> Progress:
        """Look at the losses since the last look; stop if one is not a number."""
        if self.losses:
            losses = self.accelerator.reduce(torch.stack(self.losses), "mean").tolist()
            norms = [float(norm) for norm in self.norms]
            self.metrics.add(self.step - len(losses), losses, norms, self.job.optimizer)
            self.losses, self.norms = [], []
            for offset, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
                if not math.isfinite(loss) or not math.isfinite(
                    norm
                ):  # the step after a bad norm would save bad weights
                    self._stop(self.step - len(losses) + offset, loss, norm)
            self.last_loss = losses[-1]
        now, (first, began) = time.perf_counter(), self.clock
        tokens = (self.step - first) * self.job.batch_size * self.job.tokens_per_row
        speed = tokens / max(now - began, 1e-9)
        self.looks += 1
        if self.looks == 1:
            self.clock = (self.step, now)
        mfu = speed * self.flops / self.peak
        return Progress(self.step, self.job.optimizer.steps, self.last_loss, speed, mfu, self.seconds(now))

    def seconds(self, now: float) -> float:
        """What this run took, earlier calls included."""
        return self.earlier_seconds + now - self.started

    def any_process(self, flag: bool) -> bool:
        """Whether any process says so: all must take the same way."""
        if self.accelerator.num_processes == 1:
            return flag
        return bool(self.accelerator.reduce(torch.tensor(float(flag), device=self.accelerator.device), "sum") > 0)

    def _stop(self, step: int, loss: float, norm: float) -> None:
        kept = checkpoint.checkpoints(self.folder)
        where = f"the last good checkpoint is {kept[-1]}" if kept else "no checkpoint had been written yet"
        raise TrainingStoppedError(
            f"loss is {loss} and gradient norm {norm} at step {step}; {where}; "
            "lower optimizer.peak_lr or use run.precision = 'fp32'"
        )

    def save(self) -> Path:
        """A checkpoint of this moment."""
        path = checkpoint.save(
            self.folder,
            self.step,
            self.network,
            self._inner_optimizer(),
            {"config": self.job.settings, "seconds": self.seconds(time.perf_counter())},
            write_model=self._write_model,
            is_main=self.accelerator.is_main_process,
            keep=self.job.run.keep_checkpoints,
        )
        self.accelerator.wait_for_everyone()
        return path

    def _write_model(self, folder: Path, weights: dict[str, Tensor]) -> None:
        write_model(self.model, folder, weights)
        self.job.write_beside(folder)

    def finish(self) -> Path:
        """The last checkpoint becomes the model; what only resuming needed is dropped."""
        final = self.folder / "model"
        if self.accelerator.is_main_process:
            os.replace(checkpoint.checkpoints(self.folder)[-1], final)  # from here on the run is finished
            _clean(self.folder)
            self.metrics.close()
        self.accelerator.wait_for_everyone()
        return final


def write_model(model: PreTrainedModel, folder: Path, weights: dict[str, Tensor]) -> None:
    """Save the model of an objective from the objective's gathered weights."""
    state = {name.removeprefix("model."): weight for name, weight in weights.items()}
    if model.config.tie_word_embeddings:  # gathered from shards, it no longer is the embedding's own storage
        state.pop("lm_head.weight", None)
    model.save_pretrained(folder, state_dict=state)


def _clean(folder: Path) -> None:
    """Drop what only resuming needed, also when an earlier call was killed before it could."""
    (folder / "model" / "optimizer.safetensors").unlink(missing_ok=True)
    for path in checkpoint.checkpoints(folder):
        shutil.rmtree(path)


def _check_same_run(earlier: dict[str, Any], job: Job, folder: Path) -> None:
    """A folder holds one run: only the `run` section may change between calls, but not its seed."""
    now = json.loads(json.dumps(job.settings))
    sections = sorted(now.keys() - {"run"})
    found = [one for name in sections for one in _differences(now[name], earlier.get(name, {}), name)]
    found += _differences(job.run.seed, earlier["run"]["seed"], "run.seed")
    if found:
        (name, value, was), *rest = found
        more = "".join(f", {other} is {new!r} and was {old!r}" for other, new, old in rest)
        raise ValueError(f"{name} is {value!r}, but {folder} was started with {was!r}{more}; choose another --out")


def _differences(now: Any, before: Any, name: str) -> list[tuple[str, Any, Any]]:
    """Each setting that is not what it was: its name, its value, and what it was.

    >>> _differences({"lr": 1, "data": {"a": 2}}, {"lr": 1, "data": {"a": 3}}, "stage")
    [('stage.data.a', 2, 3)]
    """
    if isinstance(now, dict) and isinstance(before, dict):
        keys = sorted(now.keys() | before.keys())
        return [one for key in keys for one in _differences(now.get(key), before.get(key), f"{name}.{key}")]
    return [] if now == before else [(name, now, before)]


def _bf16(precision: str) -> bool:
    return precision == "bf16" or (precision == "auto" and torch.cuda.is_available())
