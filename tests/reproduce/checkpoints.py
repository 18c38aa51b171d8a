"""A tiny LLaMA checkpoint with its tokenizer, texts and minimal pairs: what a drop-in study is made of."""

import json
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

from farspan.data import load_tokenizer

STUDY = """
[corpus]
train = {{ "{folder}/train.jsonl" = 1.0 }}
held_out = ["{folder}/test.jsonl"]
checkpoint = "{folder}/llama"
pairs = ["{folder}/pairs.jsonl"]
[training]
run = {{ checkpoint_every = 2 }}
[evaluation]
texts = 2
text_tokens = 128
cases = 2
new_tokens = 2
text_bytes = 300
pairs = 3
stride = 8
inside = 32
long = [32]
long_stride = 32
[models.original]
start = "checkpoint"
attention = "rope"
measures = "full"
scalings = ["none", "yarn-4"]
[models.calibrated]
start = "checkpoint"
attention = "coca-exact"
calibrate_tokens = 1024
calibrate_steps = 1
measures = "light"
[models.distill]
start = "calibrated"
recipe = "{folder}/distill.toml"
measures = "light"
[models.distill-long]
start = "calibrated"
recipe = "{folder}/long.toml"
measures = "full"
[measures.full]
window = 16
perplexity_lengths = [16, 64, 128]
passkey_lengths = [240]
[measures.light]
window = 16
perplexity_lengths = [16]
"""

STAGE = """
[[stages]]
name = "{name}"
objective = {{ {objective} = 1.0 }}
length = 16
batch_size = 2
{more}
optimizer = {{ steps = 4, peak_lr = 1e-3, accumulation = 1 }}
"""


def write_texts(path: Path, name: str, count: int) -> None:
    """Write documents that differ."""
    lines = [json.dumps({"text": f"{name} {i} says {i * 7} and {i * i}. " * 20}) for i in range(count)]
    path.write_text("\n".join(lines) + "\n")


def made(folder: Path) -> Path:
    """Write everything a study needs; return its preset, whose second recipe is the first and one stage more."""
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=257, max_position_embeddings=32, bos_token_id=None, eos_token_id=0, **shape)
    LlamaForCausalLM(config).save_pretrained(folder / "llama")
    load_tokenizer("bytes").save(folder / "llama")
    for name, count in (("train", 60), ("test", 3)):
        write_texts(folder / f"{name}.jsonl", name, count)
    pairs = [{"good": f"{i} cats sleep", "bad": f"{i} cats sleeps", "set": "s", "field": "f"} for i in range(4)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)) + "\n")
    scaling = 'rope_parameters = { rope_type = "dynamic", factor = 4.0 }'
    first = STAGE.format(name="attention", objective="attention-output", more="train_length = 16")
    first += STAGE.format(name="logits", objective="logit-kl", more="")
    first += STAGE.format(name="text", objective="next-token", more="")
    (folder / "distill.toml").write_text(first)
    (folder / "long.toml").write_text(first + STAGE.format(name="long", objective="next-token", more=scaling))
    (folder / "preset.toml").write_text(STUDY.format(folder=folder))
    return folder / "preset.toml"
