"""Two processes share one model by FSDP.

Accelerate's own FSDP needs GPUs; here torch shards the model, and our checkpoints must not notice.
"""

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from farspan import FarspanConfig, FarspanForCausalLM
from farspan.training import checkpoint
from farspan.training.config import OptimizerSection
from farspan.training.loop import write_model
from farspan.training.optimizer import make_optimizer
from farspan.training.pretraining import NextToken


def build(sharded: bool, weights: Path | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    config = FarspanConfig.preset("tiny", num_hidden_layers=2, hidden_size=32, intermediate_size=48)
    model = FarspanForCausalLM(config) if weights is None else FarspanForCausalLM.from_pretrained(weights)
    network = NextToken(model)
    if sharded:
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(network)
    return network, make_optimizer(model, OptimizerSection(peak_lr=1e-2), "cpu")


def steps(network: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> list[float]:
    found = []
    for step in range(first, first + count):
        ids = torch.randint(0, 512, (4, 17), generator=torch.Generator().manual_seed(step))
        loss = network(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def save(folder: Path, step: int, network: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    write = partial(write_model, network.model)
    main = not dist.is_initialized() or dist.get_rank() == 0
    path = checkpoint.save(folder, step, network, optimizer, {}, write_model=write, is_main=main, keep=9)
    if dist.is_initialized():
        dist.barrier()
    return path


def losses(folder: Path, *, sharded: bool) -> list[float]:
    """Three steps, a checkpoint, and three more from what was read back."""
    network, optimizer = build(sharded)
    found = steps(network, optimizer, 0, 3)
    path = save(folder, 3, network, optimizer)
    network, optimizer = build(sharded, path)
    checkpoint.load_optimizer(path, network, optimizer)
    found += steps(network, optimizer, 3, 3)
    save(folder, 6, network, optimizer)
    return found


def main(folder: Path) -> None:
    """Be one of the two processes; the first prints the losses."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = losses(folder, sharded=True)
    if dist.get_rank() == 0:
        print(*found)
    dist.destroy_process_group()
