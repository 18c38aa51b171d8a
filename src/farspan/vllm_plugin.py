"""vLLM's entry point (group `vllm.general_plugins`): it serves farspan models through its Transformers backend.

vLLM calls :func:`register` in each of its processes. Loading this module has registered the model's Auto classes.
What runs is :class:`farspan.FarspanModel` with vLLM's attention, paging and sampling: keys of full width, already
turned, so RoPE and CoCA with one scaling law for the whole text. The model refuses what that attention cannot do.
"""

ARCHITECTURE = "FarspanForCausalLM"
BACKEND = "vllm.model_executor.models.transformers:TransformersForCausalLM"


def register() -> None:
    """Tell vLLM which of its classes runs our architecture; a second call changes nothing."""
    from vllm import ModelRegistry

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, BACKEND)
