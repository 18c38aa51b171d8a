"""Generation, torch.compile and PEFT: what users do on the first day."""

import copy

import pytest
import torch

from farspan import FarspanCache, FarspanForCausalLM
from tests.models.small import (
    CONFIGURATIONS,
    LINEAR,
    LOCAL,
    MIXED,
    NOPE,
    PER_QUERY,
    PER_REQUEST,
    TIGHT,
    compiled_steps,
    make,
    name_of,
    tokens,
)

GREEDY = {"do_sample": False, "pad_token_id": 0}


def check_greedy(model: FarspanForCausalLM, out: torch.Tensor, prompt: int) -> None:
    """Check that each new token is the likeliest one after those before it, computed anew without a cache."""
    logits = model(out[:, :-1], use_cache=False).logits[:, prompt - 1 :]
    assert torch.equal(logits.argmax(-1), out[:, prompt:])


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=name_of)
@torch.no_grad()
def test_generate_equals_recomputation_of_each_row_alone(options: dict) -> None:
    model, x, pads = make(**options), tokens(3, 14), [0, 3, 9]
    mask = torch.stack([torch.arange(14) >= pad for pad in pads]).long()
    for cache in ("dynamic", "static"):
        settings = {"max_new_tokens": 12, "cache_implementation": cache, **GREEDY}
        plain, padded = model.generate(x, **settings), model.generate(x, attention_mask=mask, **settings)
        assert plain.shape == padded.shape == (3, 26)
        check_greedy(model, plain, 14)
        for row, pad in enumerate(pads):
            check_greedy(model, padded[row : row + 1, pad:], 14 - pad)


@pytest.mark.parametrize(
    "options",
    [{"attention": MIXED, "rope_parameters": PER_QUERY}, {"attention": LINEAR, "cosformer_beyond": "decay"}],
    ids=name_of,
)
@torch.no_grad()
def test_beam_search_does_not_depend_on_the_cache(options: dict) -> None:
    model, x = make(**options), tokens(2, 10)
    options = {"max_new_tokens": 12, "num_beams": 3, **GREEDY}
    want = model.generate(x, use_cache=False, **options)
    for cache in ("dynamic", "static"):
        assert torch.equal(model.generate(x, cache_implementation=cache, **options), want)


@torch.no_grad()
def test_what_is_sampled_depends_on_the_seed_and_not_on_the_cache() -> None:
    model, x = make(MIXED, rope_parameters=PER_QUERY), tokens(2, 10)
    options = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.8, "top_p": 0.9, "pad_token_id": 0}
    own, samples = FarspanCache(model.config), []
    caches = ({}, {"past_key_values": own}, {"use_cache": False}, {"cache_implementation": "static"})
    for seed, cache in (*((0, cache) for cache in caches), (1, {})):
        torch.manual_seed(seed)
        samples.append(model.generate(x, **options, **cache))
    assert all(torch.equal(sample, samples[0]) for sample in samples[1:4])
    assert not torch.equal(samples[0], samples[4])
    assert own.get_seq_length() == 21


@pytest.mark.parametrize("attention", ["coca-exact", "rope"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_per_request_generation_uses_the_base_of_the_whole_request(attention: str, cache: str) -> None:
    model, x = make(attention, rope_parameters=PER_REQUEST), tokens(1, 10)
    out = model.generate(x, max_new_tokens=20, cache_implementation=cache, **GREEDY)
    logits = model(out[:, :-1], rotary_length=30).logits
    assert torch.equal(logits[0, 9:].argmax(-1), out[0, 10:])


@torch.no_grad()
def test_each_row_has_the_base_of_its_own_request() -> None:
    """Padding on the left takes no part in a request; an assistant gets along with it."""
    model, x, pads = make(MIXED, rope_parameters=PER_REQUEST), tokens(3, 14), [0, 3, 9]
    mask = torch.stack([torch.arange(14) >= pad for pad in pads]).long()
    out = model.generate(x, attention_mask=mask, max_new_tokens=12, **GREEDY)
    for row, pad in enumerate(pads):
        alone = model.generate(x[row : row + 1, pad:], max_new_tokens=12, **GREEDY)
        assert torch.equal(alone, out[row : row + 1, pad:])
    assert torch.equal(model.generate(x[:1], max_new_tokens=12, assistant_model=model, **GREEDY), out[:1])


@torch.no_grad()
def test_assisted_generation_rolls_the_cache_back() -> None:
    model, x = make(MIXED), tokens(1, 12)
    plain = model.generate(x, max_new_tokens=20, **GREEDY)
    for assistant in (make("rope"), make(MIXED)):
        assert torch.equal(model.generate(x, max_new_tokens=20, assistant_model=assistant, **GREEDY), plain)


STATIC = {"cache_implementation": "static", "return_dict_in_generate": True, **GREEDY}


@pytest.mark.parametrize(
    "options",
    [
        {"attention": "coca-exact"},
        {"attention": MIXED, "rope_parameters": PER_QUERY},
        {"attention": LINEAR, "cosformer_beyond": "decay"},
    ],
    ids=name_of,
)
@torch.no_grad()
def test_a_static_cache_serves_later_calls_that_need_no_more_slots(options: dict) -> None:
    """Shorter prompts, other batch sizes and padding; what the first call left behind changes no token."""
    model = make(**options)
    fresh = copy.deepcopy(model)
    first = model.generate(tokens(2, 20), max_new_tokens=10, **STATIC)
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, :4] = 0
    for x, settings in ((tokens(2, 7), {}), (tokens(3, 9), {"attention_mask": mask}), (tokens(1, 20), {})):
        later = model.generate(x, max_new_tokens=8, **settings, **STATIC)
        assert later.past_key_values is first.past_key_values
        want = copy.deepcopy(fresh).generate(x, max_new_tokens=8, **settings, **GREEDY)
        assert torch.equal(later.sequences, want)


@torch.no_grad()
def test_a_static_cache_is_replaced_where_it_is_too_short() -> None:
    model = make(MIXED)
    first = model.generate(tokens(1, 6), max_new_tokens=4, **STATIC)
    longer = model.generate(x := tokens(1, 12), max_new_tokens=10, **STATIC)
    assert longer.past_key_values is not first.past_key_values
    check_greedy(model, longer.sequences, 12)
    again = model.generate(x, max_new_tokens=10, **STATIC)
    assert again.past_key_values is longer.past_key_values
    assert torch.equal(again.sequences, longer.sequences)


@torch.no_grad()
def test_a_kept_static_cache_follows_the_model_to_another_dtype_and_other_angles() -> None:
    model, x = make(MIXED), tokens(1, 12)
    model.generate(x, max_new_tokens=10, **STATIC)
    model.set_rope_parameters(**PER_QUERY)
    check_greedy(model, model.generate(x, max_new_tokens=10, **STATIC).sequences, 12)
    model.float()
    want = model.generate(x, max_new_tokens=10, **GREEDY)
    assert torch.equal(model.generate(x, max_new_tokens=10, **STATIC).sequences, want)


@pytest.mark.slow
def test_training_step_compiles_without_a_graph_break() -> None:
    model, x = make(MIXED, log_length=True, rope_parameters=PER_QUERY).train(), tokens(2, 24)
    eager = model(x, labels=x, use_cache=False).loss
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(x, labels=x, use_cache=False).loss
    loss.backward()
    assert torch.allclose(eager, loss, atol=1e-5)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "masked"),
    [
        ({"attention": MIXED, "rope_parameters": PER_QUERY}, True),
        ({"attention": [LOCAL, "alibi", NOPE], "log_length": "learned", "kv_shift": True}, False),
        ({"attention": LINEAR, "cosformer_beyond": "decoupled"}, True),
    ],
    ids=lambda x: name_of(x) if isinstance(x, dict) else "padded" if x else "plain",
)
@torch.no_grad()
def test_static_decoding_compiles_once(options: dict, masked: bool) -> None:
    """No graph break, and no new graph for each token, also while a window fills up and after."""
    model, x, mask = make(**options), tokens(2, 24), torch.ones(2, 24, dtype=torch.long)
    mask[0, :3] = 0
    found, graphs = compiled_steps(model, x, 5, 28, mask if masked else None)
    want = model(x, attention_mask=mask if masked else None).logits[:, 5:]
    assert (found - want).abs().max() <= TIGHT
    assert graphs <= 4


@pytest.mark.parametrize("options", [{"attention": MIXED}, {"rope_parameters": PER_REQUEST}], ids=name_of)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_generation_from_embeddings_equals_generation_from_tokens(options: dict, cache: str) -> None:
    model, x = make(**options), tokens(1, 12)
    settings = {"max_new_tokens": 10, "cache_implementation": cache, **GREEDY}
    from_tokens = model.generate(x, **settings)[:, 12:]
    assert torch.equal(model.generate(inputs_embeds=model.model.embed_tokens(x), **settings), from_tokens)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_a_static_window_wider_than_the_text_hides_padding_in_every_implementation(implementation: str) -> None:
    x, mask = tokens(2, 4), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    settings = {"attention_mask": mask, "max_new_tokens": 6, "disable_compile": True, **GREEDY}
    options = {"attention": ["rope", {"kind": "rope", "window": 40}], "num_hidden_layers": 2}
    model = make(**options, attn_implementation=implementation)
    static = model.generate(x, cache_implementation="static", **settings)
    assert torch.equal(static, model.generate(x, **settings))


@torch.no_grad()
def test_chunked_prefill_changes_no_token() -> None:
    model, x = make(MIXED), tokens(2, 20)
    plain = model.generate(x, max_new_tokens=10, **GREEDY)
    assert torch.equal(model.generate(x, max_new_tokens=10, prefill_chunk_size=7, **GREEDY), plain)


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


def test_peft_prompts_train_and_generate() -> None:
    """They come with a mask of floats; a prefix comes with a cache, whose keys CoCA and PoPE cannot use."""
    peft = pytest.importorskip("peft")
    x, settings = tokens(2, 10), {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}
    mask = torch.ones_like(x)
    pope = ["rope", {"kind": "pope", "window": 4}, "alibi"]
    for attention, width in (
        (["rope", "alibi", "rope"], ""),
        (MIXED, "4 numbers per key in layer 2"),
        (pope, "16 numbers per key in layer 1"),
    ):
        prefix = peft.get_peft_model(make(attention), peft.PrefixTuningConfig(**settings))
        for model in (peft.get_peft_model(make(attention), peft.PromptTuningConfig(**settings)), prefix):
            if model is prefix and width:
                with pytest.raises(ValueError, match=f"must hold {width}, got 8; PEFT's prefix"):
                    model(input_ids=x, attention_mask=mask)
                continue
            model(input_ids=x, attention_mask=mask, labels=x).loss.backward()
            assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
            assert model.generate(input_ids=x, attention_mask=mask, max_new_tokens=3, **GREEDY).shape == (2, 13)
