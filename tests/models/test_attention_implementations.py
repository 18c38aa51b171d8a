"""Other implementations of attention, vLLM's among them: the same numbers, or an error."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.models.small import (
    LEFT,
    MIXED,
    NOPE,
    PER_QUERY,
    PER_REQUEST,
    RIGHT,
    TIGHT,
    chunked,
    make,
    name_of,
    poisoned,
    tokens,
)


def test_attention_reads_as_vllm_wants_it() -> None:
    """Its Transformers backend parses forward's source: the interface's name, one call of it, scaling an attribute."""
    import ast
    import inspect
    import textwrap

    from farspan.modeling_farspan import FarspanAttention

    tree = ast.parse(textwrap.dedent(inspect.getsource(FarspanAttention.forward)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    interface = [call for call in calls if getattr(call.func, "id", None) == "attention_interface"]
    assert len(interface) == 1
    scaling = next(keyword.value for keyword in interface[0].keywords if keyword.arg == "scaling")
    assert isinstance(scaling, ast.Attribute)
    assert scaling.value.id == "self"  # type: ignore[attr-defined]
    assert "ALL_ATTENTION_FUNCTIONS" in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


@pytest.mark.parametrize(
    ("implementation", "options"),
    [
        ("eager", {"attention": MIXED}),
        ("eager", {"attention": "coca-slack", "log_length": True}),
        ("sdpa", {"attention": "rope"}),
        ("sdpa", {"attention": "coca-exact", "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}),
        ("sdpa", {"attention": "coca-strict"}),
        ("eager", {"attention": [{"kind": "pope", "window": 8}, "pope", NOPE], "log_length": "learned"}),
        ("sdpa", {"attention": MIXED, "log_length": True}),
    ],
    ids=lambda x: x if isinstance(x, str) else name_of(x),
)
@torch.no_grad()
def test_other_attention_implementations_agree(implementation: str, options: dict) -> None:
    model, x = make(**options), tokens(2, 20)
    embedded = model.model.embed_tokens(x)
    wanted = [model(x, attention_mask=mask).logits for mask in (LEFT, RIGHT)]
    model.set_attn_implementation(implementation)
    for mask, want in zip((LEFT, RIGHT), wanted, strict=True):
        got = model(inputs_embeds=poisoned(embedded, mask), attention_mask=mask).logits
        assert (got - want)[mask.bool()].abs().max() <= TIGHT
    x = tokens(2, 30)
    for length, pieces in ((None, [20, 1, 1, 8]), (40, [20, 1, 1, 8]), (40, [5, 1, 1, 1, 22])):
        assert (chunked(model, x, pieces, length=length) - model(x).logits).abs().max() <= TIGHT


@torch.no_grad()
def test_eager_shows_attention_weights() -> None:
    model = make("coca-exact")
    model.set_attn_implementation("eager")
    weights = model(tokens(1, 10), output_attentions=True).attentions
    assert len(weights) == 3
    assert torch.allclose(weights[0].sum(-1), torch.ones(1, 4, 10, dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "implementation", "what"),
    [
        ({"attention": "alibi"}, "sdpa", "ALiBi"),
        ({"attention": "cosformer"}, "sdpa", "cosFormer"),
        ({"attention": "linear-coca"}, "sdpa", "linear CoCA"),
        ({"attention": [MIXED[0], NOPE, NOPE], "kv_shift": True}, "sdpa", "kv_shift"),
        ({"rope_parameters": PER_QUERY}, "sdpa", "per_query dynamic NTK"),
        ({"rope_parameters": PER_REQUEST}, "vllm", "per_request dynamic NTK"),
    ],
)
def test_what_other_implementations_cannot_do_raises(
    options: dict, implementation: str, what: str, flat_attention: str
) -> None:
    model = make(**options)
    model.set_attn_implementation(implementation)
    with pytest.raises(ValueError, match=f"attn_implementation '{implementation}' cannot run {what}; use 'farspan'"):
        model(tokens(1, 5))


@pytest.fixture
def flat_attention() -> Iterator[str]:
    """Register an attention that returns one row per token, (tokens, heads·width), as vLLM's does."""

    def attend(
        module: object, q: Tensor, k: Tensor, v: Tensor, attention_mask: None, *, scaling: float, **options: Any
    ) -> tuple[Tensor, None]:
        seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        if options["sliding_window"] is not None:
            seen = seen.triu(1 - options["sliding_window"])
        out = F.scaled_dot_product_attention(q, k, v, seen, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).flatten(2).flatten(0, 1), None

    ALL_ATTENTION_FUNCTIONS.register("vllm", attend)
    yield "vllm"
    del ALL_ATTENTION_FUNCTIONS._global_mapping["vllm"]


@torch.no_grad()
def test_attention_may_return_one_row_per_token(flat_attention: str) -> None:
    model, x = make(MIXED), tokens(2, 20)
    expected = model(x, use_cache=False).logits
    model.set_attn_implementation(flat_attention)
    assert (model(x, use_cache=False).logits - expected).abs().max() <= TIGHT


@torch.library.custom_op("farspan_tests::attend", mutates_args=())
def opaque_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Something of q, all k so far and v that the compiler cannot look into, no more than into vLLM's attention."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return ((q * k.cumsum(2)).sum(-1, keepdim=True).tanh() * v).transpose(1, 2).flatten(2).flatten(0, 1).contiguous()


@opaque_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.new_empty((q.shape[0] * q.shape[2], q.shape[1] * v.shape[3]))


@pytest.mark.slow
@torch.no_grad()
def test_one_graph_serves_steps_of_any_number_of_tokens(flat_attention: str) -> None:
    """As vLLM compiles it: one row of tokens, positions that start again with each request, and no cache."""
    ALL_ATTENTION_FUNCTIONS.register(
        flat_attention, lambda _, q, k, v, attention_mask, **rest: (opaque_attention(q, k, v), None)
    )
    model = make(MIXED)
    model.set_attn_implementation(flat_attention)
    graphs = CompileCounterWithBackend("eager")
    step = torch.compile(model.model, fullgraph=True, backend=graphs)
    for first, second in ((12, 8), (21, 12)):
        x, positions = tokens(1, first + second), torch.cat((torch.arange(first), torch.arange(second)))[None]
        options = {"input_ids": x, "position_ids": positions, "use_cache": False}
        expected = model.model(**options).last_hidden_state
        for tensor in (x, positions):
            torch._dynamo.mark_dynamic(tensor, 1)  # raises for a graph that fixes this number
        assert (step(**options).last_hidden_state - expected).abs().max() <= TIGHT
    assert graphs.frame_count == 1
