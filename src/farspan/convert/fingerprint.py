"""Which model a measurement is of: a digest of its numbers and of what it does with them."""

import json
from hashlib import sha256

import torch

from farspan.configuration_farspan import FarspanConfig
from farspan.convert.configuration import config_of, sound_config
from farspan.convert.load import EMBEDDING, HEAD, matched, same_numbers
from farspan.convert.sources import Source
from farspan.modeling_farspan import FarspanForCausalLM

COUNTS = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "coca_activation",
    "cosformer_max_length",
    "cosformer_beyond",
    "cosformer_activation",
    "causal",
    "train_length",
)
"""Fields of a configuration that change what the same tensors compute, beside those that :func:`_meaning` adds.
`log_length` is not among them: each row of a result says whether it was on."""


def fingerprint(source: Source) -> str:
    """A digest that two checkpoints share if they hold one model, whether as a folder, in shards or as a GGUF file.

    Numbers count as float32, as `farspan eval` reads them: a copy in fewer bits is another model. A head that equals
    the embedding counts as tied to it, though it be stored once more. Tensors are read one by one, these two together.
    """
    config = config_of(source)
    with sound_config(source.config, source.place), torch.device("meta"):
        plan = matched(source, FarspanForCausalLM(config))
    theirs_of = {ours: theirs for theirs, ours in plan.items()}
    if HEAD in theirs_of and same_numbers(source, theirs_of[HEAD], theirs_of[EMBEDDING]):
        del plan[theirs_of[HEAD]]
    digest = sha256(json.dumps(_meaning(config), sort_keys=True).encode())
    for theirs, ours in sorted(plan.items(), key=lambda pair: pair[1]):
        tensor = source.read(theirs).to(torch.float32).contiguous()
        digest.update(f"{ours} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy())  # type: ignore[arg-type]
    return digest.hexdigest()


def _meaning(config: FarspanConfig) -> dict[str, object]:
    """Only what differs from the defaults, so that a field that is new one day changes no older digest."""
    plain = FarspanConfig()
    found = {name: getattr(config, name) for name in COUNTS if getattr(config, name) != getattr(plain, name)}
    specs = [[spec.name, spec.window, spec.rotary] for spec in config.attention_specs]
    angles = config.rotary()
    epsilon = float(torch.tensor(config.rms_norm_eps))  # GGUF files keep it in float32
    return {**found, "attention": specs, "base": angles.base, "law": repr(angles.scaling), "epsilon": epsilon}
