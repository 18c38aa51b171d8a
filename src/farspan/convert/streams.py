"""Hidden states of all calibration windows on their way up through a model, kept on a GPU with room or on disk."""

import os
from collections.abc import Iterator, Sequence
from tempfile import NamedTemporaryFile, gettempdir

import torch
from torch import Tensor

from farspan.files import NO_ROOM
from farspan.layers import Attention
from farspan.modeling_farspan import FarspanBlock, FarspanForCausalLM

PASS = 8192
"""Tokens that go through a block together where the device keeps the streams: fewer leave a GPU idle."""


def fits(size: int, device: torch.device) -> bool:
    """Whether a device keeps so many bytes for good: a GPU with twice as many free."""
    return device.type == "cuda" and 2 * size <= torch.cuda.mem_get_info(device)[0]


def mapped(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A CPU tensor whose memory is a file without a name in the temporary folder: the system frees it when we end.

    >>> x = mapped((2, 3), torch.bfloat16).fill_(1)
    >>> float(x.sum())
    6.0
    """
    numbers = torch.Size(shape).numel()
    size = numbers * dtype.itemsize
    with NamedTemporaryFile(prefix="farspan-", suffix=".hidden") as file:
        try:
            if hasattr(os, "posix_fallocate"):  # a full disk is an error here, and would be a crash at a later write
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                os.truncate(file.fileno(), size)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise OSError(
                f"calibration needs {size / 2**20:,.0f} MiB for hidden states in {gettempdir()!r}, got none "
                f"({error.strerror}); calibrate on fewer tokens, or name a folder with more space in TMPDIR"
            ) from error
        return torch.from_file(file.name, shared=True, size=numbers, dtype=dtype).view(*shape)


class Streams:
    """What the original gives each layer, and what the new model gives it: (windows, length, hidden) each.

    In the model's dtype, once as long as both agree: on a GPU that has room, else in the temporary folder, from where
    they pass through memory `batch` windows at a time. So calibration needs memory for a batch, whatever the number of
    windows.
    """

    def __init__(self, model: FarspanForCausalLM, ids: Tensor, batch: int) -> None:
        embed = model.model.embed_tokens
        self._batch, self._device = batch, model.device
        shape = (*ids.shape, embed.embedding_dim)
        self._kept = fits(2 * torch.Size(shape).numel() * model.dtype.itemsize, model.device)
        self._teacher = self._student = self._room(shape, model.dtype)
        with torch.no_grad():
            for place, rows in zip(self._teacher.split(batch), ids.split(batch), strict=True):
                place.copy_(embed(rows.to(self._device)))

    def _room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._device) if self._kept else mapped(shape, dtype)

    def inputs(self, block: FarspanBlock, windows: slice) -> "Inputs":
        """What the attention of a block gets, for some of the windows."""
        return Inputs(block, self._teacher[windows], self._student[windows], self._batch, self._device)

    def original(self, windows: slice) -> Iterator[Tensor]:
        """The original's stream itself in float32, batch by batch."""
        for hidden in self._teacher[windows].split(self._batch):
            yield hidden.to(self._device).float()

    @torch.no_grad()
    def advance(self, block: FarspanBlock, teacher: Attention, student: Attention) -> None:
        """Both through a block, each with its own attention; as long as they agree, once."""
        parted = self._student is self._teacher and student is not teacher
        if parted:
            self._student = self._room(self._teacher.shape, self._teacher.dtype)
        step = max(self._batch, PASS // self._teacher.shape[1]) if self._kept else self._batch
        for start in range(0, len(self._teacher), step):
            part = slice(start, start + step)
            theirs = self._teacher[part].to(self._device)
            if self._student is not self._teacher:
                ours = theirs if parted else self._student[part].to(self._device)
                self._student[part] = _through(block, student, ours)
            self._teacher[part] = _through(block, teacher, theirs)


def _through(block: FarspanBlock, attention: Attention, h: Tensor) -> Tensor:
    h = h + attention(block.input_layernorm(h))
    return h + block.mlp(block.post_attention_layernorm(h))


class Inputs:
    """Normed inputs of teacher and student in float32, each batch made when it is asked for (farspan.convert.fit)."""

    def __init__(self, block: FarspanBlock, teacher: Tensor, student: Tensor, batch: int, device: torch.device) -> None:
        self._norm, self._device = block.input_layernorm, device
        self._teacher, self._student = teacher.split(batch), student.split(batch)
        self._agree = teacher.data_ptr() == student.data_ptr()

    def __len__(self) -> int:
        return len(self._teacher)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        theirs = self._normed(self._teacher[index])
        return theirs, theirs if self._agree else self._normed(self._student[index])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self[index] for index in range(len(self)))

    @torch.no_grad()
    def _normed(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self._norm(hidden.to(self._device)).float()
        return normed
