"""One plain training loop on Accelerate: one process, several GPUs and several nodes are the same code.

The batch of a step is a pure function of seed and step, there is no dropout, and the learning rate follows from the
step. So a checkpoint is weights, moments and a step number, and a run that was killed goes on to the same losses, bit
for bit.
"""

import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from farspan.errors import require
from farspan.training import checkpoint
from farspan.training.checkpoint import TrainingStoppedError
from farspan.training.config import OptimizerSection, RunSection
from farspan.utils import (
    Progress,
    check_folder,
    check_unchanged,
    explain_write_errors,
    lock,
    remove,
    silent,
    sync,
    write_text,
)

T = TypeVar("T")
FLUSH_EVERY = 10
"""Steps between readings of the loss: each reading waits for the device."""
METRICS = "metrics.jsonl"
"""The first file of a run, and the mark of its folder."""


class Rows(Protocol):
    """Batches as a pure function of step and process: that is what makes a resumed run exact."""

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Tensor:
        """Return the rows of one process at one step; rows come first."""
        ...


@dataclass(frozen=True)
class Job:
    """What is trained, on what, and how a batch becomes a loss.

    Data and weights come as functions, so that a finished run opens neither. Parameters that `start` and `load` freeze
    (``requires_grad=False``) are left out of the optimizer, but belong to every checkpoint.
    """

    settings: dict[str, Any]
    """What the folder belongs to, section by section. Of "run" only the seed must stay the same on resuming."""
    optimizer: OptimizerSection
    run: RunSection
    batch_size: int
    """Rows per step, all processes together."""
    tokens_per_row: int
    start: Callable[[], PreTrainedModel]
    load: Callable[[Path], PreTrainedModel]
    batches: Callable[[], Rows]
    objective: Callable[[Any], nn.Module]
    """Model → module with it as ``.model`` whose forward is the loss of one batch. Keep what must be neither saved nor
    distributed, such as a teacher, out of its registered modules."""
    write_beside: Callable[[Path], None]
    """Write what a model folder needs beside weights and configuration, such as the tokenizer."""


def format_loss(value: float) -> str:
    """Write a loss briefly; a distance from a teacher may be far below one.

    >>> format_loss(2.7661), format_loss(0.000412)
    ('2.766', '0.00041')
    """
    return f"{value:.3f}" if value >= 0.1 else f"{value:.2g}"


def run(job: Job, out: str | os.PathLike[str], *, progress: Progress = silent) -> Path:
    """Do a job, or go on where an earlier call stopped; return the folder of the finished model.

    Args:
        out: the folder of the run: checkpoints, ``metrics.jsonl``, TensorBoard events, and at the end ``model``.
        progress: called every few steps with steps done, all steps, and a line of loss and speed.
    """
    folder = Path(out)
    with working_in(folder, METRICS, "of a training run"):
        if (folder / "model").is_dir():
            check_same_run(folder / "model", job)
            on_main(partial(clean, folder))
            return folder / "model"
        here, steps = _Run(job, folder), job.optimizer.steps
        with interruption(partial(checkpoint.last_step, folder)) as interrupted:
            for step in range(here.step, steps):
                here.advance(step)
                stop, last = here.any_process(interrupted()), here.step == steps
                due = last or stop or here.step % job.run.checkpoint_every == 0
                if due or here.step % FLUSH_EVERY == 0:
                    status = here.flush()
                    if main_process():
                        progress(here.step, steps, status)
                if due:
                    here.save()
                if stop:
                    raise KeyboardInterrupt(f"stopped at step {here.step}; the same command continues")
            if here.any_process(interrupted()):  # during the last save: a next stage should not begin
                raise KeyboardInterrupt(f"stopped at step {steps}; the same command continues")
        return here.finish()


# Processes and folders


def main_process() -> bool:
    """Return whether this process writes; of several that were launched together one does."""
    return bool(_processes().is_main_process)


def _processes() -> PartialState:
    return PartialState(cpu=not torch.cuda.is_available())


def on_main(function: Callable[[], T]) -> T:
    """Call a function in the main process; return its value, or raise its error, in all of them."""
    if _processes().num_processes == 1:
        return function()
    found: list[Any] = [None]
    if main_process():
        try:
            found = [function()]
        except (ValueError, OSError, TrainingStoppedError) as error:
            found = [error]
    broadcast_object_list(found)
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


@contextmanager
def working_in(folder: Path, marker: str, what: str) -> Iterator[None]:
    """Check and lock the folder of a command. Processes that were launched together share the lock of the main one."""
    with ExitStack() as held:

        def enter() -> None:
            check_folder(folder, marker, what=what)
            held.enter_context(lock(folder))

        on_main(enter)
        yield


@contextmanager
def interruption(saved: Callable[[], int]) -> Iterator[Callable[[], bool]]:
    """Make the first Ctrl-C a flag that the loop reads after each step; a second one raises KeyboardInterrupt.

    `saved` returns the step that the same command would continue from, should the run end now.

    >>> with interruption(lambda: 0) as interrupted:
    ...     interrupted()
    False
    """
    seen, say = list[int](), main_process()

    def remember(number: int, _: Any) -> None:
        if seen:
            raise KeyboardInterrupt(f"stopped at once; the same command continues from step {saved()}")
        seen.append(number)
        if say:  # not print: the signal may have come during one
            line = f"stopping after this training step; Ctrl-C again stops sooner, back at step {saved()}\n"
            os.write(2, line.encode())

    try:
        before = signal.signal(signal.SIGINT, remember)
    except ValueError:  # not the main thread
        yield lambda: False
        return
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)


# The run


class _Run:
    """The moving parts of one run."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self.folder = job, folder
        bf16 = job.run.precision == "bf16" or (job.run.precision == "auto" and torch.cuda.is_available())
        disable_progress_bar()  # transformers would draw one for every checkpoint
        self.accelerator = accelerator = Accelerator(
            mixed_precision="bf16" if bf16 else "no",
            gradient_accumulation_steps=job.optimizer.accumulation,
            cpu=not torch.cuda.is_available(),  # several processes on CPUs form a group only when told so
        )
        pieces = job.optimizer.accumulation * accelerator.num_processes
        require(
            job.batch_size % pieces == 0,
            f"data.batch_size must be a multiple of accumulation × processes = {pieces}, got {job.batch_size}",
        )
        self.batches = job.batches()
        earlier = on_main(partial(checkpoint.newest_intact, folder))
        if earlier is not None:
            check_same_run(earlier, job)
        torch.manual_seed(job.run.seed)
        model = job.start() if earlier is None else job.load(earlier)
        if job.run.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        if job.run.compile:
            compile_blocks(model)
        self.model = model.train()
        optimizer = make_optimizer(model, job.optimizer, accelerator.device)
        self.network, self.optimizer = accelerator.prepare(job.objective(model), optimizer)
        self.step, earlier_seconds = 0, 0.0
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        if earlier is not None:
            state = checkpoint.load_optimizer(earlier, self.network, self.optimizer.optimizer)
            self.step, earlier_seconds = state["step"], state["seconds"]
        self.metrics = Metrics(folder, self.step) if accelerator.is_main_process else None
        peak = matmul_peak(accelerator.device, torch.bfloat16 if bf16 else torch.float32) * accelerator.num_processes
        self.peak_tokens = peak / flops_per_token(model, job.tokens_per_row)
        self.began = time.perf_counter() - earlier_seconds
        self.clock = (self.step, time.perf_counter())
        self.speed: dict[str, float] = {}
        """Seconds of all calls of the run; tokens per second since the first reading, so that compilation does not
        count; and their share of the matrix peak, measured at the start."""

    def advance(self, step: int) -> None:
        """Take one optimizer step on the batch of this step."""
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

    def flush(self) -> str:
        """Read the losses since the last reading, and say how they are. Stop for one that is not finite, or a norm."""
        losses = self.accelerator.reduce(torch.stack(self.losses), "mean").tolist()
        norms = [float(norm) for norm in self.norms]
        first = self.step - len(losses)
        self.losses, self.norms = [], []
        if self.metrics is not None:
            self.metrics.add(first, losses, norms, self.job.optimizer)
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), first):
            if not math.isfinite(loss + norm):  # the step after a bad norm would save bad weights
                raise TrainingStoppedError(
                    f"loss is {loss} and gradient norm {norm} at step {step}; {checkpoint.last_good(self.folder)}; "
                    "lower optimizer.peak_lr or use run.precision = 'fp32'"
                )
        now, (start, began) = time.perf_counter(), self.clock
        speed = (self.step - start) * self.job.batch_size * self.job.tokens_per_row / max(now - began, 1e-9)
        if not self.speed:
            self.clock = (self.step, now)
        mfu = speed / self.peak_tokens
        self.speed = {"seconds": now - self.began, "tokens_per_second": speed, "mfu": mfu}
        return f"step {self.step:,}, loss {format_loss(losses[-1])}, {speed:,.0f} tokens/s, MFU {mfu:.0%}"

    def any_process(self, flag: bool) -> bool:
        """Return whether the flag is set in any process: all must go on in the same way."""
        if self.accelerator.num_processes == 1:
            return flag
        return bool(self.accelerator.reduce(torch.tensor(float(flag), device=self.accelerator.device), "sum") > 0)

    def save(self) -> None:
        """Save a checkpoint. Each process takes part in gathering; the main one writes."""
        weights, moments = checkpoint.gather(self.network, self.optimizer.optimizer)
        state = {"config": self.job.settings, **self.speed}
        on_main(partial(checkpoint.write, self.folder, self.step, weights, moments, state, self._write_model))

    def _write_model(self, folder: Path, weights: dict[str, Tensor]) -> None:
        state = {name.removeprefix("model."): weight for name, weight in weights.items()}
        if self.model.config.tie_word_embeddings:  # gathered from shards, it no longer shares the embedding's storage
            state.pop("lm_head.weight", None)
        self.model.save_pretrained(folder, state_dict=state)
        self.job.write_beside(folder)

    def finish(self) -> Path:
        """Make the last checkpoint the model; drop what only resuming needed."""
        final = self.folder / "model"

        def rename() -> None:
            os.replace(checkpoint.checkpoints(self.folder)[-1], final)  # from here on the run is finished
            sync(self.folder)
            clean(self.folder)

        on_main(rename)
        if self.metrics is not None:
            self.metrics.close()
        return final


def clean(folder: Path) -> None:
    """Drop what only resuming needed, also when an earlier call was killed before it could."""
    for name in (checkpoint.CHECKSUMS, "optimizer.safetensors"):
        (folder / "model" / name).unlink(missing_ok=True)
    for path in folder.glob("checkpoint-*"):
        if checkpoint.NAME.fullmatch(path.name.removesuffix(".damaged").removesuffix(".part")):
            remove(path)


def check_same_run(model: Path, job: Job) -> None:
    """Raise unless a checkpoint or a finished model is of this job; its `run` section may differ, but not the seed."""
    try:
        before = json.loads((model / "trainer.json").read_text())["config"]
        before["run"] = {"seed": before["run"]["seed"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(
            f"{str(model)!r} must hold the trainer.json of a run, got none or a damaged one; choose another --out"
        ) from None
    now = json.loads(json.dumps(job.settings)) | {"run": {"seed": job.run.seed}}
    check_unchanged(before, now, f"run in {str(model.parent)!r}")


# Optimizer, learning rate, speed


def make_optimizer(model: PreTrainedModel, section: OptimizerSection, device: torch.device | str) -> torch.optim.AdamW:
    """Make the paper's AdamW (Sec. 3.3); matrices decay, norms and biases do not."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": section.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=section.peak_lr,
        betas=section.betas,
        fused=torch.device(device).type == "cuda",
    )


def compile_blocks(model: PreTrainedModel) -> None:
    """Compile block by block: they share their code, so that one compilation serves them all."""
    for block in model.model.layers:
        block.compile()


def learning_rate(step: int, section: OptimizerSection) -> float:
    """Warm up linearly from start_lr to peak_lr over the first share of steps, then decay linearly to end_lr.

    >>> section = OptimizerSection(steps=200, start_lr=0.0, peak_lr=1.0, end_lr=0.5, warmup_share=0.01)
    >>> [learning_rate(step, section) for step in (0, 2, 101, 200)]
    [0.0, 1.0, 0.75, 0.5]
    """
    warmup = max(1, round(section.steps * section.warmup_share))
    if step < warmup:
        return section.start_lr + (section.peak_lr - section.start_lr) * step / warmup
    return section.peak_lr + (section.end_lr - section.peak_lr) * (step - warmup) / max(1, section.steps - warmup)


def flops_per_token(model: PreTrainedModel, length: int) -> float:
    """Count floating-point operations of forward and backward per token: 6 per weight, and the attention products.

    A causal token sees length/2 others on average; a window layer sees its window. Recomputation does not count.
    """
    config = model.config
    weights = sum(p.numel() for name, p in model.named_parameters() if ".embed_" not in name)
    if config.tie_word_embeddings:  # the embedding works as the head
        weights += config.vocab_size * config.hidden_size
    seen = sum(min(length / 2, spec.window or length) for spec in config.attention_specs)
    assert config.head_dim is not None
    return 6 * weights + 12 * config.num_attention_heads * config.head_dim * seen


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the operations per second of a large matrix product (best of several)."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    best = 0.0
    for _ in range(8):
        wait()
        start = time.perf_counter()
        a @ b
        wait()
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


# Records


class Metrics:
    """Write metrics.jsonl and TensorBoard events. Rows from the resumed step on are dropped: they will come again."""

    def __init__(self, folder: Path, step: int) -> None:
        path = folder / METRICS
        lines = path.read_text().splitlines() if path.exists() else []
        try:
            rows = [(line, json.loads(line)) for line in lines if line.endswith("}")]
            kept = [line for line, row in rows if row["step"] < step]
            require(all({"loss", "lr"} <= row.keys() for _, row in rows), "a row has no loss")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(
                f"out must be a new folder or one of a training run, got {str(folder)!r} with the metrics of something "
                "else; choose another"
            ) from None
        write_text(path, "".join(f"{line}\n" for line in kept))
        self.file = path.open("a")
        self.events: Any = None
        with suppress(ImportError):
            # Not torch's SummaryWriter: its thread prints a traceback when the disk is full.
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.summary.writer.record_writer import RecordWriter

            (folder / "tensorboard").mkdir(exist_ok=True)
            name = f"events.out.tfevents.{time.time():.6f}.{os.getpid()}"
            self.events = RecordWriter(open(folder / "tensorboard" / name, "wb"))  # noqa: SIM115
            self.event = Event
            self._add_event(file_version="brain.Event:2")
            self._add_event(step=step, session_log={"status": "START"})  # drops later steps of earlier files

    def add(self, first: int, losses: list[float], norms: list[float], section: OptimizerSection) -> None:
        """Write rows for steps first, first + 1, …"""
        with explain_write_errors(Path(self.file.name)):
            for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), first):
                row = {"loss": loss, "lr": learning_rate(step, section), "grad_norm": norm}
                self.file.write(json.dumps({"step": step, **row}) + "\n")
                if self.events is not None:
                    values = [{"tag": tag, "simple_value": value} for tag, value in row.items()]
                    self._add_event(step=step, summary={"value": values})
            self.file.flush()

    def _add_event(self, **fields: Any) -> None:
        self.events.write(self.event(wall_time=time.time(), **fields).SerializeToString())
        self.events.flush()

    def close(self) -> None:
        self.file.close()
        if self.events is not None:
            self.events.close()
