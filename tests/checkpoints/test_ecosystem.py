"""A converted folder in the tools people already use: pipeline, Trainer, LoRA."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, pipeline

from farspan.convert import convert_folder
from tests.checkpoints.sources import with_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaMA checkpoint converted to CoCA, with its tokenizer."""
    torch.manual_seed(0)
    parent = tmp_path_factory.mktemp("ecosystem")
    convert_folder(with_tokenizer(parent / "source"), parent / "ours", "coca-exact")
    return parent / "ours"


def test_pipeline_gives_what_generate_gives(folder: Path) -> None:
    write = pipeline("text-generation", model=str(folder), device="cpu")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": 0}
    ids = model.generate(**tokenizer("two words", return_tensors="pt"), **settings)
    assert write("two words", **settings)[0]["generated_text"] == tokenizer.decode(ids[0], skip_special_tokens=True)


def test_trainer_lowers_the_loss_and_saves_what_loads(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor(tokenizer("a line to learn by heart " * 8).input_ids[:128]).view(8, 16)
    settings = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=settings, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0]
    trainer.save_model(str(tmp_path / "saved"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model.eval()(ids).logits)


def test_lora_on_a_converted_model_trains_t_and_merges(folder: Path) -> None:
    peft = pytest.importorskip("peft", reason="pip install peft")
    model, ids = AutoModelForCausalLM.from_pretrained(folder), torch.randint(0, 257, (2, 12))
    adapter = peft.LoraConfig(r=2, target_modules=["t_proj", "q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    wrapped = peft.get_peft_model(model, adapter)
    wrapped(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for name, p in wrapped.named_parameters() if "t_proj.lora" in name)
    wrapped.eval()
    with torch.no_grad():
        expected = wrapped(ids).logits
        assert (wrapped.merge_and_unload()(ids).logits - expected).abs().max() <= 1e-5
