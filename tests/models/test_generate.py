"""Generation, torch.compile and PEFT: what users do on the first day."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from farspan import FarspanCache
from tests.models.small import CONFIGURATIONS, MIXED, PER_QUERY, PER_REQUEST, TIGHT, make, name_of, tokens


def greedy_by_hand(model, x: torch.Tensor, new: int) -> torch.Tensor:
    """Greedy decoding that recomputes everything at every step."""
    for _ in range(new):
        x = torch.cat((x, model(x, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
    return x


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=name_of)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_generate_equals_recomputation(options: dict, cache: str) -> None:
    model, x = make(**options), tokens(2, 10)
    out = model.generate(x, max_new_tokens=25, do_sample=False, cache_implementation=cache, pad_token_id=0)
    assert torch.equal(out, greedy_by_hand(model, x, 25))


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=name_of)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_generate_with_left_padding_equals_each_row_alone(options: dict, cache: str) -> None:
    model, x = make(**options), tokens(3, 14)
    pads = [0, 3, 9]
    mask = torch.stack([torch.arange(14) >= pad for pad in pads]).long()
    out = model.generate(
        x, attention_mask=mask, max_new_tokens=20, do_sample=False, cache_implementation=cache, pad_token_id=0
    )
    for row, pad in enumerate(pads):
        assert torch.equal(out[row, pad:], greedy_by_hand(model, x[row : row + 1, pad:], 20)[0])


@torch.no_grad()
def test_beam_search_does_not_depend_on_the_cache() -> None:
    model, x = make(MIXED, rope_parameters=PER_QUERY), tokens(2, 10)
    options = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(x, **options), model.generate(x, use_cache=False, **options))


@torch.no_grad()
def test_sampling_and_a_cache_of_ones_own() -> None:
    model, x = make(), tokens(1, 10)
    cache = FarspanCache(model.config)
    out = model.generate(x, max_new_tokens=8, do_sample=True, past_key_values=cache, pad_token_id=0)
    assert out.shape == (1, 18)
    assert cache.get_seq_length() == 17
    cache.crop(-7)
    again = model(out[:, 10:12], past_key_values=cache).logits
    assert (again - model(out[:, :12]).logits[:, 10:]).abs().max() <= TIGHT


@torch.no_grad()
def test_what_is_sampled_depends_on_the_seed_and_not_on_the_cache() -> None:
    model, x = make(MIXED, rope_parameters=PER_QUERY), tokens(2, 10)
    options = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.8, "top_p": 0.9, "pad_token_id": 0}
    texts = []
    for seed, cache in ((0, {}), (0, {"use_cache": False}), (0, {"cache_implementation": "static"}), (1, {})):
        torch.manual_seed(seed)
        texts.append(model.generate(x, **options, **cache))
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])
    assert not torch.equal(texts[0], texts[3])


@torch.no_grad()
def test_per_request_generation_uses_the_base_of_the_whole_request() -> None:
    model, x = make("coca-exact", rope_parameters=PER_REQUEST), tokens(1, 10)
    out = model.generate(x, max_new_tokens=20, do_sample=False, pad_token_id=0)
    logits = model(out[:, :-1], rotary_length=30).logits
    assert torch.equal(logits[0, 9:].argmax(-1), out[0, 10:])


@torch.no_grad()
def test_assisted_generation_rolls_the_cache_back() -> None:
    model, assistant, x = make(MIXED), make("rope"), tokens(1, 12)
    plain = model.generate(x, max_new_tokens=20, do_sample=False, pad_token_id=0)
    assisted = model.generate(x, max_new_tokens=20, do_sample=False, pad_token_id=0, assistant_model=assistant)
    assert torch.equal(plain, assisted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"attention": "coca-exact"},
        {"attention": MIXED, "log_length": True},
        {"attention": "coca-exact", "rope_parameters": PER_QUERY},
    ],
    ids=name_of,
)
def test_training_step_compiles_without_a_graph_break(options: dict) -> None:
    model, x = make(**options, num_hidden_layers=3).train(), tokens(2, 24)
    eager = model(x, labels=x, use_cache=False).loss
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(x, labels=x, use_cache=False).loss
    loss.backward()
    assert torch.allclose(eager, loss, atol=1e-5)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize(
    "options",
    [{"rope_parameters": PER_QUERY}, {"attention": MIXED, "log_length": True}, {"attention": "alibi"}],
    ids=name_of,
)
@torch.no_grad()
def test_static_decoding_compiles_once(options: dict, masked: bool) -> None:
    """No graph break, and no new graph for each token, also while a window fills up and after."""
    model, x = make(**options), tokens(2, 30)
    mask = torch.ones_like(x)
    mask[0, :3] = 0
    cache = FarspanCache(model.config, max_length=32)
    extra = {"attention_mask": mask[:, :5]} if masked else {}
    model(x[:, :5], past_key_values=cache, **extra)
    torch.compiler.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    step, parts = torch.compile(model, fullgraph=True, backend=graphs), []
    for i in range(5, 30):
        extra = {"attention_mask": torch.nn.functional.pad(mask[:, : i + 1], (0, 31 - i))} if masked else {}
        parts.append(step(x[:, i : i + 1], past_key_values=cache, **extra).logits)
    extra = {"attention_mask": mask} if masked else {}
    assert (torch.cat(parts, dim=1) - model(x, **extra).logits[:, 5:]).abs().max() <= TIGHT
    assert graphs.frame_count <= 4


@pytest.mark.parametrize("options", [{}, {"attention": MIXED}, {"rope_parameters": PER_REQUEST}], ids=name_of)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_generation_from_embeddings_equals_generation_from_tokens(options: dict, cache: str) -> None:
    model, x = make(**options), tokens(1, 12)
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
    from_tokens = model.generate(x, **settings)[:, 12:]
    assert torch.equal(model.generate(inputs_embeds=model.model.embed_tokens(x), **settings), from_tokens)


@torch.no_grad()
def test_chunked_prefill_and_beams_with_a_static_cache() -> None:
    model, x = make(MIXED), tokens(2, 20)
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(x, **settings)
    assert torch.equal(model.generate(x, prefill_chunk_size=7, **settings), plain)
    beams = model.generate(x, num_beams=3, use_cache=False, **settings)
    assert torch.equal(model.generate(x, num_beams=3, cache_implementation="static", **settings), beams)


def test_peft_lora_trains_and_merges() -> None:
    peft = pytest.importorskip("peft")
    model, x = make(MIXED), tokens(1, 12)
    before = model(x).logits
    names = [n for n in model.lora_target_modules if any(m.endswith(n) for m, _ in model.named_modules())]
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=names, task_type="CAUSAL_LM"))
    wrapped(input_ids=x, labels=x).loss.backward()
    touched = {name.split(".lora_")[0].split(".")[-1] for name, p in wrapped.named_parameters() if p.grad is not None}
    assert touched == set(names)
    assert torch.allclose(wrapped.merge_and_unload()(x).logits, before, atol=1e-5)
