"""vLLM's entry point (group `vllm.general_plugins`): it serves farspan models through its Transformers backend.

vLLM calls :func:`register` in each of its processes. It runs :class:`farspan.FarspanModel` with its own attention,
paging and sampling. Its cache holds rotated keys of full width, so RoPE and CoCA work under any fixed scaling. The
model raises for what that attention cannot do.
"""

ARCHITECTURE = "FarspanForCausalLM"
BACKEND = "vllm.model_executor.models.transformers:TransformersForCausalLM"


def register() -> None:
    """Register the model with transformers' Auto classes and with vLLM; a second call changes nothing."""
    from vllm import ModelRegistry

    from farspan import modeling_farspan  # noqa: F401  (registers the Auto classes when imported)

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, BACKEND)
