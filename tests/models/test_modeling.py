"""The model: one set of numbers whatever the path, and a good citizen of transformers."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from farspan import FarspanCache, FarspanConfig, FarspanForCausalLM, FarspanForMaskedLM
from farspan.convert import from_pretrained
from farspan.layers import Attention
from farspan.models.modeling import farspan_attention

NAMES = ["rope", "alibi", "coca-exact", "coca-strict", "coca-slack"]
LOCAL = {"kind": "coca", "form": "exact", "window": 8}
MIXED = [LOCAL, "rope", {"kind": "coca", "form": "slack", "rotary": False}]
PER_QUERY = {"rope_type": "dynamic", "factor": 4.0, "mode": "per_query"}
PER_REQUEST = {"rope_type": "dynamic", "factor": 4.0, "mode": "per_request"}


TIGHT = 1e-10
"""Bound for float64, where the initialisation is strong: nothing but rounding may differ."""


def make(
    attention: object = "coca-exact", *, dtype: torch.dtype = torch.float64, **options: object
) -> FarspanForCausalLM:
    settings = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "train_length": 8,
        # Strong enough that a wrong mask or angle moves the logits; float32 would show its rounding at 0.3.
        "initializer_range": 0.3 if dtype == torch.float64 else 0.1,
    }
    return FarspanForCausalLM(FarspanConfig(attention=attention, **(settings | options))).to(dtype).eval()


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(1, 97, shape)  # 0 is padding, from which `generate` would infer a mask


CONFIGURATIONS = [
    *({"attention": name} for name in NAMES),
    {"attention": MIXED},
    {"attention": "coca-exact", "rope_parameters": PER_QUERY},
    {"attention": "rope", "rope_parameters": PER_QUERY},
    {"attention": MIXED, "rope_parameters": PER_QUERY},
    {"attention": "coca-slack", "cache_layout": "rotated"},
    {"attention": "coca-exact", "coca_activation": "softplus", "qk_norm": True, "qkv_bias": True},
    {"attention": "coca-exact", "rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
    {"attention": [{"kind": "alibi", "window": 1}, {"kind": "coca", "window": 2}, {"kind": "rope", "window": 1}]},
    {"attention": "coca-exact", "rope_parameters": {"rope_type": "ntk", "factor": 4.0}},
    {"attention": [*MIXED[:2], "alibi"], "log_length": True},
    {"attention": "coca-slack", "log_length": True, "rope_parameters": PER_QUERY},
    {
        "attention": ["cosformer", {"kind": "coca", "rotary": False}, "rope"],
        "log_length": True,
        "cosformer_beyond": "decay",
    },
    {"attention": "cosformer", "cosformer_max_length": 300},
    {"attention": "cosformer", "cosformer_beyond": "decay"},
    {"attention": ["cosformer", LOCAL, "cosformer"], "cosformer_beyond": "decoupled", "qk_norm": True},
    {
        "attention": ["linear-coca", LOCAL, {"kind": "linear-coca", "rotary": False}],
        "rope_parameters": {"rope_type": "ntk", "factor": 4.0},
        "coca_activation": "softplus",
        "qk_norm": True,
    },
]


def name_of(options: dict) -> str:
    return "-".join(str(v.get("rope_type")) if isinstance(v, dict) else str(v)[:12] for v in options.values())


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=name_of)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, TIGHT)], ids=["fp32", "fp64"])
@torch.no_grad()
def test_prefill_equals_decode_equals_any_chunking(options: dict, dtype: torch.dtype, bound: float) -> None:
    """130 tokens at training length 8: dynamic NTK grows through four doublings on the way."""
    model, x = make(**options, dtype=dtype), tokens(2, 130)
    whole = model(x).logits
    for pieces in ([1] * 130, [7, 1, 9, 47, 66], [64, 66]):
        cache = FarspanCache(model.config)
        parts = [model(piece, past_key_values=cache).logits for piece in x.split(pieces, dim=1)]
        assert (torch.cat(parts, dim=1) - whole).abs().max() <= bound
    assert whole.std() > 0.05


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=name_of)
@torch.no_grad()
def test_batch_mates_and_history_change_nothing(options: dict) -> None:
    model = make(**options)
    long, short = tokens(1, 75), tokens(1, 21)
    alone = model(short).logits
    model(tokens(1, 200))  # an unrelated longer call
    x = torch.cat((long, torch.cat((tokens(1, 54), short), dim=1)))
    mask = torch.ones_like(x)
    mask[1, :54] = 0
    batched = model(x, attention_mask=mask).logits
    assert (batched[1, 54:] - alone[0]).abs().max() <= TIGHT
    cache, parts = FarspanCache(model.config), []
    seen = 0
    for piece in x.split([60, 1, 1, 13], dim=1):
        seen += piece.shape[1]
        parts.append(model(piece, attention_mask=mask[:, :seen], past_key_values=cache).logits)
    assert (torch.cat(parts, dim=1)[1, 54:] - alone[0]).abs().max() <= TIGHT
    assert (torch.cat(parts, dim=1)[0] - model(long).logits[0]).abs().max() <= TIGHT


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=name_of)
@torch.no_grad()
def test_right_padding_and_a_static_cache_give_the_same_logits(options: dict) -> None:
    model, x = make(**options), tokens(2, 30)
    mask = torch.ones_like(x)
    mask[1, 20:] = 0
    padded, alone = model(x, attention_mask=mask).logits, model(x[1:, :20]).logits
    assert (padded[1, :20] - alone[0]).abs().max() <= TIGHT
    cache = FarspanCache(model.config, max_length=40)
    parts = [model(piece, past_key_values=cache).logits for piece in x.split([18, 1, 1, 10], dim=1)]
    assert (torch.cat(parts, dim=1) - model(x).logits).abs().max() <= TIGHT


@pytest.mark.parametrize(
    "make_cache", [DynamicCache, lambda config: DynamicCache(config=config)], ids=["bare", "config"]
)
@torch.no_grad()
def test_plain_transformers_caches_work(make_cache) -> None:
    model, x = make(MIXED), tokens(1, 40)
    cache = make_cache(model.config) if make_cache is not DynamicCache else DynamicCache()
    parts = [model(piece, past_key_values=cache).logits for piece in x.split([25, 1, 14], dim=1)]
    assert (torch.cat(parts, dim=1) - model(x).logits).abs().max() <= TIGHT


@pytest.mark.parametrize("attention", [*NAMES, MIXED, {"kind": "cosformer", "rotary": False}, "linear-coca"], ids=str)
@torch.no_grad()
def test_packed_documents_equal_separate_ones(attention: object) -> None:
    model = make(attention)
    documents = [tokens(1, n) for n in (11, 5, 20)]
    positions = torch.cat([torch.arange(d.shape[1]) for d in documents])[None]
    x = torch.cat(documents, dim=1)
    separate = torch.cat([model(d).logits for d in documents], dim=1)
    for options in ({}, {"use_cache": False}, {"attention_mask": torch.ones_like(x)}):
        if "attention_mask" in options:
            options["use_cache"] = False
        packed = model(x, position_ids=positions, **options)
        assert (packed.logits - separate).abs().max() <= TIGHT
        assert packed.past_key_values is None  # packed documents cannot be continued
    with pytest.raises(ValueError, match="position_ids must go on by one where a cache is used"):
        model(x, position_ids=positions, past_key_values=FarspanCache(model.config))


@torch.no_grad()
def test_positions_with_gaps_are_used_as_given() -> None:
    model, x = make("rope"), tokens(1, 12)
    spread = model(x, position_ids=torch.arange(12)[None] * 3).logits
    assert (spread - model(x).logits).abs().max() > 1e-3
    assert (model(x, position_ids=torch.arange(12)[None] + 50).logits - model(x).logits).abs().max() <= 1e-7


@torch.no_grad()
def test_positions_given_with_a_cache_shift_the_whole_text() -> None:
    model, x = make("coca-slack"), tokens(1, 30)  # slack sees absolute positions
    want = model(x, position_ids=torch.arange(100, 130)[None]).logits
    cache, parts = FarspanCache(model.config), []
    for begin, end in ((0, 11), (11, 12), (12, 30)):
        positions = torch.arange(100 + begin, 100 + end)[None]
        parts.append(model(x[:, begin:end], position_ids=positions, past_key_values=cache).logits)
    assert (torch.cat(parts, dim=1) - want).abs().max() <= TIGHT


@torch.no_grad()
def test_right_padding_can_be_continued_without_windows_and_is_refused_with_them() -> None:
    mask = torch.ones(1, 23, dtype=torch.long)
    mask[0, 14:20] = 0
    x = tokens(1, 23)
    real = x[:, mask[0].bool()]
    for attention in ("coca-exact", "coca-slack", "rope", "alibi"):
        model = make(attention)
        cache = FarspanCache(model.config)
        model(x[:, :20], attention_mask=mask[:, :20], past_key_values=cache)
        continued = model(x[:, 20:], attention_mask=mask, past_key_values=cache).logits
        assert (continued - model(real).logits[:, -3:]).abs().max() <= TIGHT
    model = make(MIXED)
    cache = FarspanCache(model.config)
    model(x[:, :20], attention_mask=mask[:, :20], past_key_values=cache)
    with pytest.raises(ValueError, match="window layers cannot continue; pad on the left"):
        model(x[:, 20:], attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"attention_mask": torch.ones(1, 7, dtype=torch.long)},
            r"attention_mask must have shape \(1, 10\).* got \(1, 7\)",
        ),
        ({"attention_mask": torch.ones(2, 10, dtype=torch.long)}, r"attention_mask must have shape \(1, 10\)"),
        ({"attention_mask": torch.zeros(1, 10)}, "as integers or bool, got torch.float32"),
        ({"attention_mask": torch.ones(1, 1, 10, 10, dtype=torch.bool)}, r"must have shape \(batch, tokens so far\)"),
        ({"position_ids": torch.arange(10)}, r"position_ids must have shape \(1, 10\).* got \(10,\)"),
        ({"position_ids": torch.arange(9)[None]}, r"position_ids must have shape \(1, 10\)"),
    ],
)
def test_masks_and_positions_of_the_wrong_shape_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()(tokens(1, 10), **options)


def test_a_mask_that_forgets_the_cache_is_refused() -> None:
    model = make()
    cache = model(tokens(1, 10), use_cache=True).past_key_values
    with pytest.raises(
        ValueError, match=r"attention_mask must have shape \(1, 13\), cached tokens included, got \(1, 3\)"
    ):
        model(tokens(1, 3), attention_mask=torch.ones(1, 3, dtype=torch.long), past_key_values=cache)


@torch.no_grad()
def test_bidirectional_padding_changes_nothing() -> None:
    model, x = FarspanForMaskedLM(make(MIXED).config).double().eval(), tokens(2, 20)
    mask = torch.ones_like(x)
    mask[0, :6], mask[1, 13:] = 0, 0
    out = model(x, attention_mask=mask).logits
    assert (out[0, 6:] - model(x[:1, 6:]).logits[0]).abs().max() <= TIGHT
    assert (out[1, :13] - model(x[1:, :13]).logits[0]).abs().max() <= TIGHT


def test_an_encoder_is_no_language_model(tmp_path: Path) -> None:
    """Its weights fit, but it would read what it predicts."""
    FarspanForMaskedLM(FarspanConfig.preset("tiny")).save_pretrained(tmp_path)
    for load in (FarspanForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained, from_pretrained):
        with pytest.raises(ValueError, match=r"config.causal must be True for FarspanForCausalLM, got False"):
            load(tmp_path)


@torch.no_grad()
def test_embeddings_may_be_given_instead_of_tokens() -> None:
    model, x = make(MIXED), tokens(2, 20)
    assert torch.equal(model(inputs_embeds=model.model.embed_tokens(x)).logits, model(x).logits)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(x, inputs_embeds=model.model.embed_tokens(x))


@pytest.mark.parametrize(
    "options",
    [{}, {"qk_norm": True, "log_length": True}, {"coca_activation": "softplus", "rope_parameters": PER_QUERY}],
)
def test_autocast_trains(options: dict) -> None:
    model, x = make(dtype=torch.float32, **options).train(), tokens(2, 24)
    exact = model(x, labels=x).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x, labels=x).loss
    loss.backward()
    assert (loss - exact).abs() < 0.05
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_attention_reads_as_vllm_wants_it() -> None:
    """Its Transformers backend parses forward's source: the interface's name, one call of it, scaling an attribute."""
    import ast
    import inspect
    import textwrap

    from farspan.models.modeling import FarspanAttention

    tree = ast.parse(textwrap.dedent(inspect.getsource(FarspanAttention.forward)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    interface = [call for call in calls if getattr(call.func, "id", None) == "attention_interface"]
    assert len(interface) == 1
    scaling = next(keyword.value for keyword in interface[0].keywords if keyword.arg == "scaling")
    assert isinstance(scaling, ast.Attribute)
    assert scaling.value.id == "self"  # type: ignore[attr-defined]
    assert "ALL_ATTENTION_FUNCTIONS" in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


@torch.no_grad()
def test_llama_weights_give_llama_logits() -> None:
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.1,
        )
    ).eval()
    ours = make("rope", tie_word_embeddings=False, dtype=torch.float32)
    ours.load_state_dict(llama.state_dict())
    x = tokens(2, 200)
    assert (ours(x).logits - llama(x).logits).abs().max() <= 1e-5


@torch.no_grad()
def test_cache_bytes_are_three_quarters() -> None:
    held = {}
    for attention in ("rope", "coca-exact", "coca-slack", "coca-strict"):
        model = make(attention)
        held[attention] = model(tokens(1, 64), use_cache=True).past_key_values.nbytes
    assert {held[name] / held["rope"] for name in held if name != "rope"} == {0.75}
    rotated = make("coca-exact", cache_layout="rotated")
    assert rotated(tokens(1, 64), use_cache=True).past_key_values.nbytes == held["rope"]


@torch.no_grad()
def test_window_layers_keep_only_their_window() -> None:
    model = make(MIXED)
    cache = model(tokens(1, 64), use_cache=True).past_key_values
    assert [layer.keys.shape[2] for layer in cache.layers] == [7, 64, 64]
    assert cache.layers[0].keys.untyped_storage().nbytes() == cache.layers[0].keys.nbytes  # not a view of the prompt


def test_a_rotated_cache_refuses_float16() -> None:
    model = make(cache_layout="rotated", dtype=torch.float16)
    with pytest.raises(ValueError, match="cache_layout 'rotated' cannot hold CoCA keys in float16"):
        model(tokens(1, 5), use_cache=True)
    half = make(dtype=torch.float16)
    x, cache = tokens(1, 30), FarspanCache(half.config)
    with torch.no_grad():
        parts = [half(piece, past_key_values=cache).logits for piece in x.split([20, 1, 9], dim=1)]
        assert (torch.cat(parts, dim=1) - half(x).logits).abs().max() <= 0.01


@pytest.mark.parametrize("attention", ["rope", "coca-exact", "coca-slack", MIXED], ids=str)
@pytest.mark.parametrize("log_length", [False, True], ids=["", "log"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_other_attention_implementations_agree(attention: object, log_length: bool, implementation: str) -> None:
    model, x = make(attention, log_length=log_length), tokens(2, 30)
    mask = torch.ones_like(x)
    mask[1, :7] = 0
    want = model(x, attention_mask=mask).logits
    model.set_attn_implementation(implementation)
    got = model(x, attention_mask=mask).logits
    assert (got[0] - want[0]).abs().max() <= TIGHT
    assert (got[1, 7:] - want[1, 7:]).abs().max() <= TIGHT
    for length in (None, 40):
        cache = FarspanCache(model.config, max_length=length)
        parts = [model(piece, past_key_values=cache).logits for piece in x.split([20, 1, 1, 8], dim=1)]
        assert (torch.cat(parts, dim=1) - model(x).logits).abs().max() <= TIGHT


@torch.no_grad()
def test_eager_shows_attention_weights() -> None:
    model = make("coca-exact")
    model.set_attn_implementation("eager")
    weights = model(tokens(1, 10), output_attentions=True).attentions
    assert len(weights) == 3
    assert torch.allclose(weights[0].sum(-1), torch.ones(1, 4, 10, dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "what"),
    [({"attention": "alibi"}, "ALiBi"), ({"rope_parameters": PER_QUERY}, "per_query dynamic NTK")],
)
def test_what_other_implementations_cannot_do_is_refused(options: dict, what: str) -> None:
    model = make(**options)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=f"attn_implementation 'sdpa' cannot run {what}; use 'farspan'"):
        model(tokens(1, 5))


@pytest.fixture
def flat_attention() -> Iterator[str]:
    """vLLM's attention function gives one row a token, (tokens, heads·width), where transformers' give four axes."""

    def attend(*arguments: object, **options: object) -> tuple[torch.Tensor, None]:
        out, _ = farspan_attention(*arguments, **options)
        return out.flatten(2).flatten(0, 1), None

    ALL_ATTENTION_FUNCTIONS.register("vllm", attend)
    yield "vllm"
    del ALL_ATTENTION_FUNCTIONS._global_mapping["vllm"]


@torch.no_grad()
def test_attention_may_give_one_row_a_token(flat_attention: str) -> None:
    model, x = make(MIXED), tokens(2, 20)
    expected = model(x, use_cache=False).logits
    model.set_attn_implementation(flat_attention)
    assert torch.equal(model(x, use_cache=False).logits, expected)


@torch.library.custom_op("farspan_tests::attend", mutates_args=())
def opaque_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Something of q, all k so far and v that the compiler cannot look into, no more than into vLLM's attention."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return ((q * k.cumsum(2)).sum(-1, keepdim=True).tanh() * v).transpose(1, 2).flatten(2).flatten(0, 1).contiguous()


@opaque_attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return q.new_empty((q.shape[0] * q.shape[2], q.shape[1] * v.shape[3]))


@pytest.mark.slow
@torch.no_grad()
def test_one_graph_serves_steps_of_any_number_of_tokens(flat_attention: str) -> None:
    """What vLLM compiles: one row of tokens, positions that start again with each request, and no cache."""
    ALL_ATTENTION_FUNCTIONS.register(flat_attention, lambda _, q, k, v, mask, **rest: (opaque_attention(q, k, v), None))
    model = make(MIXED)
    model.set_attn_implementation(flat_attention)
    graphs = CompileCounterWithBackend("eager")
    step = torch.compile(model.model, fullgraph=True, backend=graphs)
    for first, second in ((12, 8), (21, 12)):
        x, positions = tokens(1, first + second), torch.cat((torch.arange(first), torch.arange(second)))[None]
        options = {"input_ids": x, "position_ids": positions, "use_cache": False}
        expected = model.model(**options).last_hidden_state
        for tensor in (x, positions):
            torch._dynamo.mark_dynamic(tensor, 1)  # refuses a graph that fixes this number
        assert (step(**options).last_hidden_state - expected).abs().max() <= TIGHT
    assert graphs.frame_count == 1


def test_a_base_that_needs_the_length_of_the_request_is_refused_under_vllm(flat_attention: str) -> None:
    model = make(rope_parameters=PER_REQUEST)
    model.set_attn_implementation(flat_attention)
    with pytest.raises(ValueError, match="attn_implementation 'vllm' cannot run per_request dynamic NTK"):
        model(tokens(1, 5))


@torch.no_grad()
def test_per_request_holds_one_base_for_the_request() -> None:
    model, x = make("coca-exact", rope_parameters=PER_REQUEST), tokens(1, 40)
    fixed = model(x, rotary_length=64).logits
    cache = FarspanCache(model.config)
    parts = [model(p, past_key_values=cache, rotary_length=64).logits for p in x.split([20, 1, 19], dim=1)]
    assert (torch.cat(parts, dim=1) - fixed).abs().max() <= TIGHT
    assert (model(x).logits - fixed).abs().max() > 1e-3  # its own length gives another base
    assert (model(x, rotary_length=40).logits - model(x).logits).abs().max() <= TIGHT


def test_save_and_load_through_the_auto_classes(tmp_path) -> None:
    model, x = make(MIXED, rope_parameters=PER_QUERY), tokens(1, 20)
    model.save_pretrained(tmp_path)
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".safetensors"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert AutoConfig.from_pretrained(tmp_path).attention_specs == model.config.attention_specs
    assert torch.equal(loaded(x).logits, model(x).logits)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


@pytest.mark.parametrize("attention", ["coca-exact", "alibi", MIXED], ids=str)
def test_gradient_checkpointing_changes_no_gradient(attention: object) -> None:
    model, x = make(attention).train(), tokens(2, 24)
    gradients = []
    for switch in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        switch()
        model.zero_grad()
        model(x, labels=x).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients, strict=True))


def test_bidirectional_attention_sees_the_future() -> None:
    x, y = tokens(1, 12), tokens(1, 12)
    y[:, :-1] = x[:, :-1]
    decoder = make()
    encoder = FarspanForMaskedLM(decoder.config).double().eval()
    changes = [(model(x).logits - model(y).logits)[:, :-1].abs().max() for model in (decoder, encoder)]
    assert changes[0] == 0
    assert changes[1] > 1e-3


def test_the_paper_preset_has_350_million_parameters() -> None:
    with torch.device("meta"):
        sizes = {
            name: FarspanForCausalLM(FarspanConfig.preset("350m", attention=name)).num_parameters() for name in NAMES
        }
    assert 345e6 < sizes["rope"] < 360e6
    assert sizes["rope"] - sizes["coca-exact"] == 24 * 1024 * 512  # T is half as wide as K


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "coca-exat"}, "attention must be one of .* got 'coca-exat'; did you mean 'coca-exact'"),
        ({"attention": ["rope"]}, "one entry for each of the 3 layers, got 1"),
        ({"attention": [{"kind": "rope", "windw": 3}] * 3}, "did you mean 'window'"),
        ({"atention": "rope"}, "did you mean 'attention'"),
        ({"hidden_size": 30, "num_attention_heads": 2}, "head_dim must be even to form rotary pairs, got 15"),
        ({"hidden_size": 33}, "hidden_size must be a multiple of num_attention_heads = 4, got 33"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads = 4, got 3"),
        ({"cache_layout": "full"}, "cache_layout must be one of 'half', 'rotated', got 'full'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 0.5}}, "scaling factor must be at least 1, got 0.5"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type.* must be one of"),
        ({"rope_parameters": PER_QUERY, "cache_layout": "rotated"}, "cannot hold keys that turn with each query"),
        (
            {"attention": "cosformer", "log_length": True},
            "log_length needs a causal model with a softmax .*'cosformer'",
        ),
        ({"train_length": 1, "log_length": True}, "train_length ≥ 2, got .*train_length=1; leave it out"),
    ],
)
def test_bad_configurations_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_empty_input_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token, got length 0"):
        make()(torch.zeros(1, 0, dtype=torch.long))


def test_a_static_transformers_cache_works_too() -> None:
    model, x = make(MIXED), tokens(1, 20)
    cache = StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        parts = [model(piece, past_key_values=cache).logits for piece in x.split([12, 1, 7], dim=1)]
    assert (torch.cat(parts, dim=1) - model(x).logits).abs().max() <= TIGHT


@torch.no_grad()
def test_another_scaling_law_can_be_set_on_a_finished_model() -> None:
    model, x = make(MIXED), tokens(1, 40)
    stretched = make(MIXED, rope_parameters=PER_QUERY)
    stretched.load_state_dict(model.state_dict())
    before = model(x).logits
    model.set_rope_parameters(**PER_QUERY)
    assert torch.equal(model(x).logits, stretched(x).logits)
    with pytest.raises(ValueError, match="scaling factor must be at least 1"):
        model.set_rope_parameters(rope_type="dynamic", factor=0.1)
    assert torch.equal(model(x).logits, stretched(x).logits)
    model.set_rope_parameters(rope_type="default")
    assert torch.equal(model(x).logits, before)


@torch.no_grad()
def test_log_length_can_be_set_on_a_finished_model_and_changes_nothing_inside_its_training(tmp_path: Path) -> None:
    model, x = make("coca-exact"), tokens(1, 30)
    plain = model(x).logits
    model.set_log_length(True)
    sharp = model(x).logits
    assert (sharp[:, :8] - plain[:, :8]).abs().max() <= TIGHT
    assert (sharp[:, 8:] - plain[:, 8:]).abs().amax(-1).min() > 1e-4
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(loaded(x).logits, sharp)
    model.set_log_length(False)
    assert torch.equal(model(x).logits, plain)
    with pytest.raises(ValueError, match="log_length needs a causal model with a softmax"):
        make("cosformer").set_log_length(True)


@torch.no_grad()
def test_log_length_in_a_model_is_that_of_its_layers_whatever_stands_beside_a_text() -> None:
    """Layers of different kinds, each query by itself; then the same text after padding, and packed behind another."""
    model, x = make(["rope", "coca-slack"], num_hidden_layers=2, log_length=True), tokens(1, 20)
    hidden = model.model.embed_tokens(x)
    for block in model.model.layers:
        mine = block.self_attn
        plain = Attention(32, 4, mine.spec, num_key_heads=2).double()
        plain.load_state_dict(mine.state_dict())
        read, rows = block.input_layernorm(hidden), []
        for i in range(20):
            plain.scaling = mine.scaling * max(1.0, math.log(i + 1) / math.log(8))
            rows.append(plain(read[:, : i + 1])[:, i])
        hidden = hidden + torch.stack(rows, dim=1)
        hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
    want = model.lm_head(model.model.norm(hidden))
    assert (model(x).logits - want).abs().max() <= TIGHT
    both, mask = torch.cat((tokens(1, 15), x), dim=1), torch.ones(1, 35, dtype=torch.long)
    mask[:, :15] = 0
    assert (model(both, attention_mask=mask).logits[:, 15:] - want).abs().max() <= TIGHT
    places = torch.cat((torch.arange(15), torch.arange(20)))[None]
    assert (model(both, position_ids=places, use_cache=False).logits[:, 15:] - want).abs().max() <= TIGHT
