"""What of a model moves in a stage: frozen parameters, other angles, low-rank additions."""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from farspan.configuration_farspan import FarspanConfig
from farspan.convert.load import load
from farspan.convert.sources import open_source
from farspan.errors import require
from farspan.evaluation.laws import scaling_name
from farspan.finetune.objectives import ATTENTION_OUTPUT, new_layers
from farspan.finetune.recipe import Lora, Stage
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.ops import Linear, YaRN


def begun(path: Path, stage: Stage, teacher: FarspanConfig | None = None) -> FarspanForCausalLM:
    """The model of a folder or GGUF file as a stage begins with it, in float32."""
    model = load(open_source(path), dtype=torch.float32)
    give_lengths(model, stage)
    return prepared(model, stage, teacher)


def resumed(path: Path, stage: Stage, teacher: FarspanConfig | None = None) -> FarspanForCausalLM:
    """The model of a stage's own checkpoint."""
    if not stage.lora.r:
        return freeze(load(open_source(path), dtype=torch.float32), stage, teacher)
    model = prepared(FarspanForCausalLM(FarspanConfig.from_pretrained(path)), stage, teacher)
    missing, unexpected = model.load_state_dict(load_file(path / "model.safetensors"), strict=False)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    require(
        set(missing) <= tied and not unexpected,
        f"checkpoint {str(path)!r} must hold the weights of stage {stage.name}, got others; remove the stage's folder",
    )
    return model


def prepared(model: FarspanForCausalLM, stage: Stage, teacher: FarspanConfig | None = None) -> FarspanForCausalLM:
    """A model with the stage's low-rank additions, if it has any, and the rest frozen."""
    if stage.lora.r:
        add_lora(model, stage.lora)
    return freeze(model, stage, teacher)


def give_lengths(model: FarspanForCausalLM, stage: Stage) -> None:
    """The stage's training length and angles, which the model keeps."""
    config, rope, longest = model.config, dict(stage.rope_parameters), stage.length * stage.reach
    _refuse_far(config, stage)
    kind, trained = rope.get("rope_type"), stage.train_length or config.train_length
    if kind in ("linear", "yarn"):
        original = _original_length(config, stage)
        if kind == "linear" and "factor" not in rope and not stage.train_length:
            trained = longest  # interpolated positions are as far as these rows go, and the next law starts there
        rope.setdefault("factor", longest / original)
        require(
            rope["factor"] > 1,
            f"rope_parameters of stage {stage.name} need a factor > 1, got {rope['factor']:g} for length "
            f"{longest} and a model trained at {original:g}; lengthen the rows or leave them out",
        )
        if kind == "yarn":
            rope.setdefault("original_max_position_embeddings", round(original))
    elif rope:
        _refuse_other_law(config, stage)
    config.train_length = trained
    config.max_position_embeddings = max(config.max_position_embeddings, longest)
    if rope:
        model.set_rope_parameters(**rope)


def _refuse_far(config: FarspanConfig, stage: Stage) -> None:
    """Where positions jump, a window would reach across, `log_length` count keys that are not there, and a linear
    attention run out of its table."""
    good = not config.log_length and all(not spec.linear and spec.window is None for spec in config.attention_specs)
    require(
        stage.reach == 1 or good,
        f"reach of stage {stage.name} must be 1 for a model with windows, linear attention or log_length, "
        f"got {stage.reach}; train it in longer rows",
    )


def _original_length(config: FarspanConfig, stage: Stage) -> float:
    """The length that linear and yarn measure against: before the model's own law of the same kind, if it has one.

    So interpolating 32 → 64 → 128 ends with factor 4: a law takes the place of the one before, it is not put on top.
    """
    _refuse_other_law(config, stage)
    law = config.rotary().scaling
    if isinstance(law, Linear):
        return config.train_length / law.factor
    return law.train_length if isinstance(law, YaRN) else config.train_length


def _refuse_other_law(config: FarspanConfig, stage: Stage) -> None:
    """A law takes the place of the model's own, which the weights have learnt: only of its own kind, or "default"."""
    law = scaling_name(config.rotary().scaling)
    own, new = (config.rope_parameters or {}).get("rope_type", "default"), stage.rope_parameters["rope_type"]
    require(
        own in ("default", new) or new == "default",
        f"rope_parameters of stage {stage.name} must keep to the model's own law, {law}, got {new!r}; "
        f"leave them out, or drop that law in a stage before with rope_type = 'default'",
    )


def freeze(model: FarspanForCausalLM, stage: Stage, teacher: FarspanConfig | None = None) -> FarspanForCausalLM:
    """Let only the stage's parameters move, and of these only those its objective can teach: given the teacher's
    configuration, not those of layers that are the teacher's own."""
    names = [name for name, _ in model.named_parameters()]
    if stage.lora.r:
        moving = {name for name in names if ".lora_" in name}
    else:
        moving = set[str]()
        for pattern in stage.train:
            found = {name for name in names if fnmatchcase(name, pattern)}
            require(
                bool(found),
                f"train of stage {stage.name} must name parameters, got {pattern!r}, which fits none; "
                f"they look like {names[1]!r}",
            )
            moving |= found
    if set(stage.objective) == {ATTENTION_OUTPUT}:
        parts = ("self_attn", "input_layernorm")
        places = [f"model.layers.{i}.{part}." for i in new_layers(model.config, teacher) for part in parts]
        moving = {name for name in moving if name.startswith(tuple(places))}
    require(
        bool(moving),
        f"stage {stage.name} has nothing to train: its objective reaches none of {list(stage.train)}; "
        "convert the model first, or choose another objective",
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in moving)
    return model


def add_lora(model: FarspanForCausalLM, lora: Lora) -> None:
    """Put PEFT's low-rank layers in place of linear ones; the model stays what it is, not a wrapper around it."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError("lora needs the package 'peft', which is missing; pip install 'farspan[lora]'") from error
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    present = {name.rpartition(".")[2] for name in linear} - {"lm_head"}  # its weight is read, not its output
    targets = lora.target_modules or [name for name in model.lora_target_modules if name in present]
    for target in targets:
        require(
            target in present,
            f"lora.target_modules must be linear layers of the model ({', '.join(sorted(present))}), got {target!r}",
        )
    inject_adapter_in_model(LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=list(targets)), model)


def merge_lora(model: FarspanForCausalLM) -> FarspanForCausalLM:
    """Add the low-rank products to the weights and put the plain layers back: the same function, nothing of PEFT."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: list[tuple[str, Any]] = [(n, m) for n, m in model.named_modules() if isinstance(m, BaseTunerLayer)]
    for name, layer in layers:
        layer.merge()
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, layer.get_base_layer())
    return model.requires_grad_(True)
