"""vLLM's entry point (group `vllm.general_plugins`): it serves farspan models through its Transformers backend.

vLLM calls :func:`register` in each of its processes. It runs :class:`farspan.FarspanModel` with its own attention,
paging and sampling. Its cache holds rotated keys of full width (PoPE: of twice the width, and values too), so RoPE,
CoCA and PoPE work under any fixed scaling. It reads `layer_types` and `sliding_window` of the configuration and keeps
no more than the window in local layers. The model raises for what that attention cannot do.
"""

from contextlib import suppress
from copy import copy
from typing import Any

ARCHITECTURE = "FarspanForCausalLM"
BACKEND = "vllm.model_executor.models.transformers:TransformersForCausalLM"


def register() -> None:
    """Register the model with transformers' Auto classes and with vLLM; a second call changes nothing."""
    from vllm import ModelRegistry

    from farspan import modeling_farspan  # noqa: F401  (registers the Auto classes when imported)

    with suppress(ImportError):  # versions before 0.32 have one head size for all layers, so no PoPE
        _register_head_sizes()
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, BACKEND)


def _register_head_sizes() -> None:
    """Tell vLLM that the keys of PoPE layers are twice as wide as those of others."""
    from vllm.transformers_utils.model_arch_config_convertor import (
        MODEL_ARCH_CONFIG_CONVERTORS,
        ModelArchConfigConvertorBase,
    )

    class Convertor(ModelArchConfigConvertorBase):
        def get_per_layer_hf_configs(self) -> list[tuple[Any, Any]] | None:
            config = self.hf_config
            wide = copy(config)
            wide.head_dim = 2 * config.head_dim
            is_wide = [spec.kind == "pope" and spec.rotary for spec in config.attention_specs]
            return [(wide, wide) if found else (config, config) for found in is_wide] if any(is_wide) else None

    MODEL_ARCH_CONFIG_CONVERTORS["farspan"] = Convertor
