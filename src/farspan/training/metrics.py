"""What a run writes down about itself."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from farspan.errors import require
from farspan.files import room_for
from farspan.training.config import OptimizerSection
from farspan.training.schedule import learning_rate


class Metrics:
    """metrics.jsonl and TensorBoard; lines after the step we resume from are dropped, for they will come again."""

    def __init__(self, folder: Path, step: int, is_main: bool) -> None:
        self.file: Any = None
        self.board: Any = None
        if not is_main:
            return
        with room_for(folder):
            folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if line.endswith("}") and _step(line, path) < step]
        part = folder / "metrics.jsonl.part"
        part.write_text("".join(f"{line}\n" for line in kept))
        os.replace(part, path)
        self.file = path.open("a")
        with suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step)

    def add(self, first: int, losses: list[float], norms: list[float], section: OptimizerSection) -> None:
        """Rows for steps first, first + 1, …"""
        if self.file is None:
            return
        for offset, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
            step = first + offset
            row = {"step": step, "loss": loss, "lr": learning_rate(step, section), "grad_norm": norm}
            self.file.write(json.dumps(row) + "\n")
            if self.board is not None:
                for name in ("loss", "lr", "grad_norm"):
                    self.board.add_scalar(name, row[name], step)
        self.file.flush()

    def close(self) -> None:
        for handle in (self.file, self.board):
            if handle is not None:
                handle.close()


def _step(line: str, path: Path) -> int:
    row = json.loads(line)
    require(
        isinstance(row, dict) and row.keys() >= {"step", "loss", "lr", "grad_norm"},
        f"out must be a new folder or one of a run, got {str(path.parent)!r} with the metrics of something else; "
        "choose another",
    )
    return int(row["step"])
