"""The conditions of a measurement: device, rounding, share of the work, and the scaling of positions."""

import os
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from farspan.configuration_farspan import FarspanConfig
from farspan.errors import require
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.ops import NTK, DynamicNTK, Linear, Llama3, YaRN
from farspan.ops.rotary import Scaling
from farspan.utils import Progress, silent

Item = TypeVar("Item")
Result = TypeVar("Result")

NAMES = {NTK: "ntk", DynamicNTK: "dynamic_ntk", Linear: "linear", YaRN: "yarn", Llama3: "llama3"}
LOG = "+log"
SCALING = re.compile(
    r"own|none|(?P<kind>ntk|linear|yarn|dynamic_ntk)-(?P<factor>\d+(\.\d+)?)(/(?P<mode>per_query|per_request))?"
)


# Device, rounding and processes


def device() -> str:
    """Return the device of this process."""
    if world() > 1:
        return str(_state().device)
    return "cuda" if torch.cuda.is_available() else "cpu"


def as_trained(device: str) -> AbstractContextManager[object]:
    """Round as `farspan train` does by default: bf16 autocast on a GPU, float32 elsewhere."""
    return torch.autocast("cuda", torch.bfloat16) if device.startswith("cuda") else nullcontext()


def world() -> int:
    """Return the number of processes that `torchrun` or `accelerate launch` started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Return whether this process writes and prints."""
    return int(os.environ.get("RANK", "0")) == 0


def _state() -> Any:
    from accelerate import PartialState

    return PartialState(cpu=not torch.cuda.is_available())


def in_shares(
    function: Callable[[Item], Result], items: Sequence[Item], progress: Progress = silent, text: str = ""
) -> list[Result]:
    """Apply a function to each item, every process to its share, and return all results in order in each process.

    An item is what one process would do at once, such as a batch. So the results do not depend on their number.

    >>> in_shares(abs, [-1, 2])
    [1, 2]
    """
    processes = world()
    rank = _state().process_index if processes > 1 else 0
    mine: list[tuple[int, Result]] = []
    progress(0, len(items), text, phase=text)
    for number in range(rank, len(items), processes):
        mine.append((number, function(items[number])))
        progress(min(number + processes, len(items)), len(items), text, phase=text)
    if processes > 1:
        from accelerate.utils import gather_object

        mine = sorted(gather_object(mine), key=lambda pair: pair[0])
    return [result for _, result in mine]


# Scaling


def scaling_name(scaling: Scaling | None) -> str:
    """Return the name of a scaling with its factor, as results have it.

    >>> scaling_name(None), scaling_name(Linear(4.0)), scaling_name(DynamicNTK(4.0, 64, "per_request"))
    ('none', 'linear-4', 'dynamic_ntk-4/per_request')
    """
    if scaling is None:
        return "none"
    mode = getattr(scaling, "mode", "per_query")
    return f"{NAMES[type(scaling)]}-{scaling.factor:g}" + ("" if mode == "per_query" else f"/{mode}")


def scaling_of(config: FarspanConfig) -> str:
    """Return the name of a model's scaling; "+log" says that `log_length` is on.

    >>> scaling_of(FarspanConfig.preset("tiny", log_length=True))
    'none+log'
    """
    return scaling_name(config.rotary().scaling) + (LOG if config.log_length else "")


def check_scaling(name: str, argument: str = "scaling") -> re.Match[str]:
    """Return the parts of the name of a scaling, kind, factor and mode; raise unless a model can be given it.

    >>> check_scaling("dynamic_ntk-4/per_request+log")["factor"]
    '4'
    """
    found = SCALING.fullmatch(name.removesuffix(LOG))
    if found is None or (found["mode"] and found["kind"] != "dynamic_ntk"):
        raise ValueError(
            f"{argument} must be own, none, ntk-F, dynamic_ntk-F (/per_request), yarn-F or linear-F with a factor F, "
            f"each perhaps with +log, got {name!r}; try dynamic_ntk-4"
        )
    require(
        found["factor"] is None or 1 <= float(found["factor"]) < 1e6,
        f"{argument} must have a factor from 1 on and below a million, got {name!r}; try dynamic_ntk-4",
    )
    return found


def set_scaling(model: FarspanForCausalLM, name: str) -> None:
    """Give a model the scaling of this name in place of its own. "own" leaves its angles and `log_length` as they are.

    >>> model = FarspanForCausalLM(FarspanConfig.preset("tiny"))
    >>> set_scaling(model, "dynamic_ntk-4/per_request+log")
    >>> model.config.rotary().scaling, model.config.log_length
    (DynamicNTK(factor=4.0, train_length=64, mode='per_request'), True)
    """
    found = check_scaling(name)
    log, plain = name.endswith(LOG), name.removesuffix(LOG).removesuffix("/per_query")
    if plain != "own" or log:
        model.set_log_length(log)
    if plain in ("own", scaling_name(model.config.rotary().scaling)):
        return
    if model.config.rotary().scaling is not None:
        model.set_rope_parameters(rope_type="default")
    if found["kind"]:
        kind = found["kind"].removesuffix("_ntk")
        more = {"mode": found["mode"] or "per_query"} if kind == "dynamic" else {}
        model.set_rope_parameters(rope_type=kind, factor=float(found["factor"]), **more)
