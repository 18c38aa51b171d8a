"""A converted model computes what its source computes."""

import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from farspan import FarspanForCausalLM
from farspan.checkpoints import export_as
from farspan.checkpoints.sources import Folder
from farspan.convert import convert_folder, from_pretrained
from tests.checkpoints.sources import CASES, edit_config, saved, tokens


@pytest.mark.parametrize("case", CASES)
def test_rope_gives_the_sources_logits_and_goes_back_to_the_same_family(case: str, tmp_path: Path) -> None:
    source, ids = saved(tmp_path / "source", case), tokens()
    convert_folder(tmp_path / "source", tmp_path / "ours")
    export_as(tmp_path / "ours", tmp_path / "back", source.config.model_type)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(back) is type(source)
    with torch.no_grad():
        expected, found = source(ids).logits, from_pretrained(tmp_path / "source")(ids).logits
        assert torch.equal(back(ids).logits, expected)
    assert expected.abs().max() > 0.3
    assert (expected - found).abs().max() <= 1e-5


def test_shards_and_dtypes_are_read_as_stored(tmp_path: Path) -> None:
    source = saved(tmp_path, "llama", max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model, half = from_pretrained(tmp_path), from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.dtype == torch.float32
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    for name, parameter in source.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter)
    source.to(torch.float16).save_pretrained(tmp_path / "half")
    assert from_pretrained(tmp_path / "half").dtype == torch.float16


@pytest.mark.parametrize("case", ["llama llama3", "llama"])
def test_configurations_of_transformers_4_are_read(case: str, tmp_path: Path) -> None:
    source, ids = saved(tmp_path, case), tokens()
    rope = dict(source.config.rope_parameters)
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    scaling = None if kind == "default" else {"type": kind, **rope}
    edit_config(tmp_path, remove=("rope_parameters",), rope_theta=theta, rope_scaling=scaling)
    with torch.no_grad():
        assert (source(ids).logits - from_pretrained(tmp_path)(ids).logits).abs().max() <= 1e-5


def test_a_stored_copy_of_a_tied_head_and_old_frequencies_are_passed_over(tmp_path: Path) -> None:
    source, ids = saved(tmp_path, "llama tied"), tokens()
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, file)
    model = from_pretrained(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        assert (source(ids).logits - model(ids).logits).abs().max() <= 1e-5


def test_greedy_text_is_the_sources(tmp_path: Path) -> None:
    source, prompt = saved(tmp_path, "mistral"), tokens(7)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": 63}
    options |= {"attention_mask": torch.ones_like(prompt)}
    assert torch.equal(source.generate(prompt, **options), from_pretrained(tmp_path).generate(prompt, **options))


@pytest.mark.parametrize("form", ["exact", "slack", "strict"])
@pytest.mark.parametrize("case", ["llama biases", "qwen3 biases", "mistral", "smollm3"])
def test_a_coca_model_can_be_saved_and_loaded_by_auto_classes(case: str, form: str, tmp_path: Path) -> None:
    saved(tmp_path / "source", case)
    model, ids = from_pretrained(tmp_path / "source", f"coca-{form}"), tokens()
    source = from_pretrained(tmp_path / "source").config.attention_specs
    assert [(s.kind, s.form, s.window, s.rotary) for s in model.config.attention_specs] == [
        ("coca", form, s.window, s.rotary) for s in source
    ]
    model.save_pretrained(tmp_path / "ours")
    for again in (AutoModelForCausalLM.from_pretrained(tmp_path / "ours"), from_pretrained(tmp_path / "ours", None)):
        assert isinstance(again, FarspanForCausalLM)
        with torch.no_grad():
            assert torch.equal(again(ids).logits, model(ids).logits)


def test_w_t_starts_as_the_mean_of_the_halves_of_w_k(tmp_path: Path) -> None:
    """What the authors' code makes of a LLaMA checkpoint: k_proj loaded, its halves averaged before the ReLU."""
    source = saved(tmp_path, "llama")
    model, x = from_pretrained(tmp_path, "coca-slack"), torch.randn(2, 5, 32)
    k = source.model.layers[1].self_attn.k_proj(x).unflatten(-1, (2, 2, 4))  # heads, halves, pairs
    _, t, _ = model.model.layers[1].self_attn.project(x)
    assert torch.allclose(t.transpose(1, 2), k.mean(3).relu(), atol=1e-5)


def test_tensors_pass_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the model there is never more than the tensor being read."""
    saved(tmp_path, "qwen3")
    alive: list[weakref.ref[torch.Tensor]] = []
    original = Folder.read

    def read(self: Folder, name: str) -> torch.Tensor:
        assert not [ref for ref in alive if ref() is not None]
        tensor = original(self, name)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(Folder, "read", read)
    from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert len(alive) > 30


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "8KB"}], ids=str)
def test_what_was_read_is_mapped_no_longer(options: dict, tmp_path: Path) -> None:
    """Pages of a mapped file count as resident memory: a model would seem to need twice its size."""
    saved(tmp_path, **options)
    seen = []

    def look(*_: object, **__: object) -> None:
        seen.append(str(tmp_path) in Path("/proc/self/maps").read_text())

    from_pretrained(tmp_path, progress=look)
    assert len(seen) > 20
    assert not any(seen)
