"""A source's tensors into our model, one at a time: nothing is held but the model and the tensor on its way."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from farspan.convert.configuration import config_of, sound_config
from farspan.convert.families import IGNORED
from farspan.convert.names import filled, template
from farspan.convert.sources import Source
from farspan.errors import require
from farspan.modeling_farspan import FarspanForCausalLM

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much is done, and of how much."""

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def load(
    source: Source,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> FarspanForCausalLM:
    """The source as our model with attention "rope": the same logits. dtype None keeps the source's."""
    config = config_of(source)
    with sound_config(source.config, source.place), torch.device("meta"):
        model = FarspanForCausalLM(config)
    plan = matched(source, model)
    for done, (theirs, ours) in enumerate(plan.items()):
        # A copy: what safetensors gives is a window on the file, which may change or vanish.
        tensor = source.read(theirs).to(device=device, dtype=dtype or source.dtype, copy=True)
        _check_finite(source, theirs, tensor)
        _place(model, ours, tensor)
        if progress is not None:
            progress("reading", done + 1, len(plan))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.config.dtype = dtype or source.dtype
    if source.generation is not None:
        model.generation_config = _generation(source, source.generation)
    return model.eval()


def matched(source: Source, model: FarspanForCausalLM) -> dict[str, str]:
    """Source name → our name for every tensor, or one line about the first that is missing, extra or misshapen."""
    _refuse_adapter(source)
    inverse = {ours: theirs for theirs, ours in source.weights.items()}
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    tied = model.config.tie_word_embeddings
    plan: dict[str, str] = {}
    for ours, shape in wanted.items():
        pattern, layer = template(ours)
        theirs = filled(inverse[pattern], layer)
        if ours == HEAD and tied:
            _check_tied_head(source, theirs, filled(inverse[EMBEDDING], None))
            continue
        require(
            theirs in source.shapes,
            f"tensor {theirs!r} is missing from {str(source.path)!r}; download it again, or check that its "
            "configuration fits its weights",
        )
        require(
            source.shapes[theirs] == shape,
            f"tensor {theirs!r} must have shape {shape} by the configuration, got {source.shapes[theirs]} in "
            f"{str(source.path)!r}; check hidden_size, head counts and vocab_size",
        )
        plan[theirs] = ours
    for theirs in source.shapes:
        known = theirs in plan or template(theirs)[0] in IGNORED or (tied and theirs == inverse[HEAD])
        require(
            known,
            f"tensor {theirs!r} in {str(source.path)!r} has no place in a {source.config.get('model_type')} model of "
            f"{model.config.num_hidden_layers} layers; check num_hidden_layers, biases and model_type",
        )
    return plan


def _refuse_adapter(source: Source) -> None:
    """A folder of PEFT's layers, as a stage with `lora` leaves beside the model that it merged."""
    found = min((name for name in source.shapes if ".lora_" in name), default=None)  # the same one each time
    if found is None:
        return
    merged = source.path.resolve().with_name("merged")
    remedy = f"give {str(merged)!r}" if (merged / "config.json").is_file() else "merge them into its weights first"
    raise ValueError(
        f"checkpoint must be a plain model, got {str(source.path)!r} with low-rank additions (tensor {found!r}); "
        f"{remedy}"
    )


def _check_tied_head(source: Source, head: str, embedding: str) -> None:
    if head not in source.shapes:
        return
    require(
        same_numbers(source, head, embedding),
        f"tensor {head!r} must equal {embedding!r} where tie_word_embeddings is true, got another; "
        "set tie_word_embeddings to false in config.json",
    )


def same_numbers(source: Source, one: str, other: str) -> bool:
    """Whether two tensors of a source are equal, whatever they are stored in."""
    if source.shapes[one] != source.shapes.get(other):
        return False
    first, second = source.read(one), source.read(other)
    return torch.equal(first, second) if first.dtype == second.dtype else torch.equal(first.float(), second.float())


def _check_finite(source: Source, name: str, tensor: torch.Tensor) -> None:
    ends = torch.stack(tensor.aminmax())  # NaN where there is one; no copy, as isfinite would make
    if bool(ends.isfinite().all()):
        return
    stored = source.read(name)
    if bool(stored.isfinite().all()):
        found = f"one too large for {tensor.dtype}; choose a wider dtype"
    else:
        found = (
            f"{'NaN' if bool(stored.isnan().any()) else 'infinity'}; download it again, or take an older state of it"
        )
    raise ValueError(f"tensor {name!r} in {str(source.path)!r} must hold finite numbers, got {found}")


def _generation(source: Source, raw: dict[str, Any]) -> GenerationConfig:
    try:
        return GenerationConfig.from_dict(raw)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"generation_config.json of {str(source.path)!r} is not valid ({error}); repair or remove it"
        ) from error


def _place(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor))
