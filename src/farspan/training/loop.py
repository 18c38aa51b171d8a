"""One plain training loop on Accelerate: one process, several GPUs and several nodes are the same code.

The batch of a step is a pure function of seed and step, there is no dropout, and the learning rate follows from the
step. So a checkpoint is weights, moments and a step number, and a run that was killed goes on to the same losses, bit
for bit.
"""

import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

from farspan.data import Batches, Shards, TextTokenizer, load_tokenizer
from farspan.errors import require
from farspan.evaluation.passkey import training_document
from farspan.models import FarspanConfig, FarspanForCausalLM
from farspan.training import checkpoint
from farspan.training.config import TrainConfig
from farspan.training.loss import linear_cross_entropy
from farspan.training.metrics import Metrics
from farspan.training.optimizer import compile_blocks, make_optimizer
from farspan.training.schedule import learning_rate
from farspan.training.speed import flops_per_token, matmul_peak

FLUSH_EVERY = 10
"""Steps between looks at the loss: each look waits for the device."""


class TrainingStoppedError(RuntimeError):
    """The run cannot go on; its last good checkpoint is kept."""


class NextToken(nn.Module):
    """The objective of pre-training: ids (b, n+1) → mean loss of predicting each token from those before it."""

    def __init__(self, model: FarspanForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.model.model(ids[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind):
            hidden = hidden.to(torch.get_autocast_dtype(kind))
        return linear_cross_entropy(hidden, self.model.lm_head.weight, ids[:, 1:].flatten())


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


def train(
    config: TrainConfig,
    out: str | os.PathLike[str],
    *,
    objective: Callable[[FarspanForCausalLM], nn.Module] = NextToken,
    report: Callable[[Progress], None] | None = None,
) -> Path:
    """Train, or go on where an earlier call stopped; return the folder of the finished model.

    Args:
        config: the whole run.
        out: its folder: checkpoints, ``metrics.jsonl``, TensorBoard events, and at the end ``model``.
        objective: makes the module whose forward is the loss of a batch of ids (b, n+1).
        report: called every few steps.
    """
    folder = Path(out)
    if (folder / "model").is_dir():
        _check_same_run(json.loads((folder / "model" / "trainer.json").read_text())["config"], config, folder)
        _clean(folder)
        return folder / "model"
    disable_progress_bar()  # transformers would draw one for every checkpoint
    accelerator = Accelerator(
        mixed_precision="bf16" if _bf16(config.run.precision) else "no",
        gradient_accumulation_steps=config.optimizer.accumulation,
        cpu=not torch.cuda.is_available(),  # several processes on CPUs form a group only when told so
    )
    run = _Run(config, folder, accelerator, objective)
    with _interruption() as interrupted:
        for step in range(run.step, config.optimizer.steps):
            run.advance(step)
            last = step + 1 == config.optimizer.steps
            if last or (step + 1) % FLUSH_EVERY == 0:
                progress = run.flush()
                if report is not None and accelerator.is_main_process:
                    report(progress)
            stop = run.any_process(interrupted())
            if last or stop or (step + 1) % config.run.checkpoint_every == 0:
                run.flush()
                run.save()
            if stop:
                raise KeyboardInterrupt(f"stopped at step {step + 1}; the same command continues")
    return run.finish()


class _Run:
    """The moving parts of one run."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        accelerator: Accelerator,
        objective: Callable[[FarspanForCausalLM], nn.Module],
    ) -> None:
        self.config, self.folder, self.accelerator = config, folder, accelerator
        pieces = config.optimizer.accumulation * accelerator.num_processes
        require(
            config.data.batch_size % pieces == 0,
            f"data.batch_size must be a multiple of accumulation × processes = {pieces}, got {config.data.batch_size}",
        )
        self.tokenizer = load_tokenizer(next(iter(config.data.sources)))
        self.batches = _batches(config, self.tokenizer)
        earlier = checkpoint.checkpoints(folder)
        torch.manual_seed(config.run.seed)
        if earlier:
            model = FarspanForCausalLM.from_pretrained(earlier[-1])
        else:
            model = FarspanForCausalLM(model_config(config, self.tokenizer.vocab_size, self.tokenizer.end))
        if config.run.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        if config.run.compile:
            compile_blocks(model)
        self.model = model.train()
        self.flops = flops_per_token(model, config.data.length)
        optimizer = make_optimizer(model, config.optimizer, accelerator.device)
        self.network, self.optimizer = accelerator.prepare(objective(model), optimizer)
        self.step, self.last_loss, self.earlier_seconds = 0, math.nan, 0.0
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        if earlier:
            state = checkpoint.load_optimizer(earlier[-1], self.network, self._inner_optimizer())
            _check_same_run(state["config"], config, folder)
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
        section, accelerator = self.config.optimizer, self.accelerator
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
            self.metrics.add(self.step - len(losses), losses, norms, self.config.optimizer)
            self.losses, self.norms = [], []
            for offset, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
                if not math.isfinite(loss) or not math.isfinite(
                    norm
                ):  # the step after a bad norm would save bad weights
                    self._stop(self.step - len(losses) + offset, loss, norm)
            self.last_loss = losses[-1]
        now, (first, began) = time.perf_counter(), self.clock
        tokens = (self.step - first) * self.config.data.batch_size * self.config.data.length
        speed = tokens / max(now - began, 1e-9)
        self.looks += 1
        if self.looks == 1:
            self.clock = (self.step, now)
        mfu = speed * self.flops / self.peak
        return Progress(self.step, self.config.optimizer.steps, self.last_loss, speed, mfu, self.seconds(now))

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
            {"config": asdict(self.config), "seconds": self.seconds(time.perf_counter())},
            write_model=partial(_write_model, self.model, self.tokenizer),
            is_main=self.accelerator.is_main_process,
            keep=self.config.run.keep_checkpoints,
        )
        self.accelerator.wait_for_everyone()
        return path

    def finish(self) -> Path:
        """The last checkpoint becomes the model; what only resuming needed is dropped."""
        final = self.folder / "model"
        if self.accelerator.is_main_process:
            os.replace(checkpoint.checkpoints(self.folder)[-1], final)  # from here on the run is finished
            _clean(self.folder)
            self.metrics.close()
        self.accelerator.wait_for_everyone()
        return final


def _clean(folder: Path) -> None:
    """Drop what only resuming needed, also when an earlier call was killed before it could."""
    (folder / "model" / "optimizer.safetensors").unlink(missing_ok=True)
    for path in checkpoint.checkpoints(folder):
        shutil.rmtree(path)


def model_config(config: TrainConfig, vocab_size: int, end: int) -> FarspanConfig:
    """The model's configuration, its vocabulary and lengths taken from the data."""
    settings = {"vocab_size": vocab_size, "train_length": config.data.length, "eos_token_id": end}
    return FarspanConfig.preset(
        config.model.preset, attention=config.model.attention, **{**settings, **config.model.options}
    )


def _batches(config: TrainConfig, tokenizer: TextTokenizer) -> Batches:
    return Batches(
        [(Shards(path), weight) for path, weight in config.data.sources.items()],
        config.data.length,
        config.data.batch_size,
        config.run.seed,
        passkey_share=config.data.passkey_share,
        passkey_document=partial(training_document, tokenizer),
    )


def _write_model(model: FarspanForCausalLM, tokenizer: TextTokenizer, folder: Path, weights: dict[str, Tensor]) -> None:
    state = {name.removeprefix("model."): weight for name, weight in weights.items()}
    if model.config.tie_word_embeddings:  # gathered from shards, it no longer is the embedding's own storage
        state.pop("lm_head.weight", None)
    model.save_pretrained(folder, state_dict=state)
    tokenizer.save(folder)


def _check_same_run(earlier: dict[str, Any], config: TrainConfig, folder: Path) -> None:
    """A folder holds one run: only the `run` section may change between calls."""
    now = json.loads(json.dumps(asdict(config)))
    for section in ("model", "data", "optimizer"):
        for key, value in now[section].items():
            was = earlier[section].get(key)
            require(
                was == value,
                f"{section}.{key} is {value!r}, but {folder} was started with {was!r}; choose another --out",
            )
    require(
        earlier["run"]["seed"] == config.run.seed,
        f"run.seed is {config.run.seed}, but {folder} was started with {earlier['run']['seed']}; choose another --out",
    )


def _bf16(precision: str) -> bool:
    return precision == "bf16" or (precision == "auto" and torch.cuda.is_available())


@contextmanager
def _interruption() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a question the loop asks after each step; a second one stops at once."""
    seen: list[int] = []

    def remember(number: int, _: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    try:
        before = signal.signal(signal.SIGINT, remember)
    except ValueError:  # not the main thread
        yield lambda: False
        return
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)
