"""Small random checkpoints of every family, as transformers saves them."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from farspan.data import load_tokenizer

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def scaled(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, "factor": 4.0, **values}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama head width": ("Llama", {"head_dim": 12}),
    "llama linear": ("Llama", scaled("linear")),
    "llama dynamic": ("Llama", scaled("dynamic")),
    "llama yarn": ("Llama", scaled("yarn", original_max_position_embeddings=16)),
    "llama yarn mscale": (
        "Llama",
        scaled("yarn", original_max_position_embeddings=16, mscale=0.8, mscale_all_dim=0.5, beta_fast=4.0),
    ),
    "llama llama3": (
        "Llama",
        scaled("llama3", original_max_position_embeddings=16, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "mistral global": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2 windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 biases": ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
}


def random_model(case: str) -> PreTrainedModel:
    name, options = CASES[case]
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, **options})
    return randomize(getattr(transformers, f"{name}ForCausalLM")(config))


def randomize(model: PreTrainedModel) -> PreTrainedModel:
    """Make every tensor of a model random: zero biases and unit norms would hide a lost one."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
    return model.eval()


def saved(folder: Path, case: str = "llama", **options: Any) -> PreTrainedModel:
    """A random model, saved to the folder."""
    model = random_model(case)
    model.save_pretrained(folder, **options)
    return model


def edit_config(folder: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    """Change fields of a saved config.json."""
    raw = json.loads((folder / "config.json").read_text())
    raw = {name: value for name, value in raw.items() if name not in remove} | changes
    (folder / "config.json").write_text(json.dumps(raw))


def with_tokenizer(folder: Path) -> Path:
    """A tiny model with the byte tokenizer, whose ids stay inside its vocabulary for the letters used here."""
    model = saved(folder, "llama tied")
    model.resize_token_embeddings(257)
    model.save_pretrained(folder)
    load_tokenizer("bytes").save(folder)
    edit_config(folder, eos_token_id=0)
    return folder


def tokens(n: int = 40) -> torch.Tensor:
    return torch.randint(0, SHAPE["vocab_size"], (2, n))  # type: ignore[call-overload]
