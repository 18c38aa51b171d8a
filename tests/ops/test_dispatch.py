"""Which implementation runs a call: explain names it, with the reason for each one before it, and computes nothing."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from farspan.ops import (
    DynamicNTK,
    Rotary,
    alibi_attention,
    alibi_attention_reference,
    coca,
    coca_attention,
    coca_attention_reference,
    coca_decode,
    cosformer,
    cosformer_attention,
    cosformer_attention_reference,
    dispatch,
    explain,
    rope_attention,
    rope_attention_reference,
    softmax,
)
from farspan.ops.coca import COCA
from farspan.ops.device import why_not_triton
from tests.helpers import coca_inputs, softmax_inputs
from tests.ops.kernels import DEVICE

needs_triton = pytest.mark.skipif(why_not_triton("cuda") is not None, reason="needs triton (pip install farspan[gpu])")
DOCUMENTS = torch.zeros(1, 20, dtype=torch.long)
ON_CUDA = "it is for cuda tensors, got cpu"


def inputs(n: int, *, gradient: bool = False, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [x.detach().to(dtype).requires_grad_(gradient) for x in coca_inputs(n, 20)]


@pytest.mark.parametrize(
    ("n", "gradient", "options", "name", "reason"),
    [
        (1, False, {}, "decode_cpu", None),
        (1, False, {"form": "slack", "window": 3, "causal": False}, "decode_cpu", None),
        (2, False, {}, "sdpa", "it takes one query"),
        (1, True, {}, "sdpa", "it has no gradients"),
        (1, False, {"documents": DOCUMENTS}, "sdpa", "it does not support documents"),
        (1, False, {"backend": "sdpa"}, "sdpa", "backend is 'sdpa'"),
        (1, False, {"backend": "reference"}, "reference", "backend is 'reference'"),
    ],
)
def test_coca_on_a_cpu(n: int, gradient: bool, options: dict[str, Any], name: str, reason: str | None) -> None:
    choice = explain(coca_attention, *inputs(n, gradient=gradient), rotary=Rotary(8), **options)
    assert choice.name == name
    assert choice.skipped.get("decode_cpu") == reason
    before = [entry.name for entry in COCA.entries]
    assert list(choice.skipped) == before[: before.index(name)]  # all of those before it, in their order
    if "backend" not in options:
        assert choice.skipped["decode_triton"] == ON_CUDA
        assert choice.skipped.get("fused", ON_CUDA) == ON_CUDA


def test_other_ops_on_a_cpu() -> None:
    q, k, v = softmax_inputs(5, 20)
    for op, options in ((rope_attention, {"rotary": None}), (alibi_attention, {})):
        assert explain(op, q, k, v, **options)[:2] == ("sdpa", {})
        found = explain(op, q, k, v, **options, backend="reference")
        assert found == ("reference", {"sdpa": "backend is 'reference'"}, None)
    assert explain(cosformer_attention, q, k, v, max_length=64)[:2] == ("chunked", {"triton": ON_CUDA})
    assert explain(cosformer_attention, q, k, v, max_length=64, backend="reference").name == "reference"


@pytest.mark.parametrize("op", [coca_attention_reference, torch.nn.functional.softmax, None, "coca"])
def test_explain_raises_for_an_unknown_op(op: Any) -> None:
    with pytest.raises(ValueError, match=r"op must be one of alibi_attention, coca_attention, .*rope_attention, got "):
        explain(op, *inputs(5), rotary=Rotary(8))


def test_cudnn_gets_no_tensors_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a computer with a GPU, where cuDNN is there and a backend is asked for by name."""
    for reason in ("why_not_cudnn", "why_never_by_kernel"):
        monkeypatch.setattr(softmax, reason, lambda *_: None)
    q, k = torch.randn(1, 2, 1, 64).bfloat16(), torch.randn(1, 2, 128, 64).bfloat16()
    padding = torch.arange(128)[None] > 5
    entry = explain(rope_attention, q, k, k, rotary=None, backend="sdpa", padding_mask=padding).then
    assert entry is not None
    assert (entry.name, entry.skipped["one_query"]) == ("blocked", "the kernel needs CUDA tensors")


def test_explain_checks_the_call() -> None:
    q, t, v = inputs(5)
    with pytest.raises(ValueError, match="t must have width 4 for q of width 8, got 3"):
        explain(coca_attention, q, t[..., :3], v, rotary=Rotary(8))
    with pytest.raises(TypeError, match="unexpected keyword argument 'windw'"):
        explain(coca_attention, q, t, v, rotary=Rotary(8), windw=3)
    with pytest.raises(TypeError, match=r"missing .* required .*argument: 'rotary'"):
        explain(coca_attention, q, t, v)


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"positions": torch.arange(2**30, device="meta")}], ids=str)
def test_explain_takes_tensors_without_data(options: dict[str, Any]) -> None:
    q, t, v = (torch.empty(1, 8, 2**30, width, device="meta") for width in (64, 32, 64))
    choice = explain(coca_attention, q, t, v, rotary=Rotary(64), **options)
    assert choice.name == "sdpa"
    assert choice.skipped["decode_cpu"] == "it is for cpu tensors, got meta"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the implementations that run."""
    names: list[str] = []
    for table in (COCA, softmax.ROPE, softmax.ALIBI, cosformer.COSFORMER):
        spied = [
            entry._replace(run=lambda call, entry=entry: names.append(entry.name) or entry.run(call))
            for entry in table.entries
        ]
        monkeypatch.setattr(table, "entries", tuple(spied))
    return names


@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("rotary", [Rotary(8), Rotary(8, scaling=DynamicNTK(4, 64)), None], ids=["rope", "ntk", "nope"])
def test_what_explain_names_runs(ran: list[str], backend: str, n: int, gradient: bool, rotary: Rotary | None) -> None:
    given = inputs(n, gradient=gradient)
    choice = explain(coca_attention, *given, rotary=rotary, backend=backend)
    assert ran == []
    coca_attention(*given, rotary=rotary, backend=backend)
    assert ran == [choice.name]


@pytest.mark.parametrize(
    ("op", "twin"),
    [
        (coca_attention, coca_attention_reference),
        (rope_attention, rope_attention_reference),
        (alibi_attention, alibi_attention_reference),
        (cosformer_attention, cosformer_attention_reference),
    ],
)
def test_a_reference_has_the_signature_of_its_op(ran: list[str], op: Any, twin: Any) -> None:
    assert twin.__name__ == f"{op.__name__}_reference"
    assert inspect.signature(twin) == inspect.signature(op)
    options = {"rotary": {"rotary": Rotary(8)}, "max_length": {"max_length": 64}}
    more = next((value for name, value in options.items() if name in inspect.signature(op).parameters), {})
    twin(*(inputs(5) if op is coca_attention else softmax_inputs(5)), **more)
    assert ran == ["reference"]


# On a GPU. Fake tensors have a device without having it.


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Act as if there were an Nvidia GPU from Ampere on, whose kernels can be compiled."""
    for module in (softmax, coca_decode):
        monkeypatch.setattr(module, "is_ampere", lambda *_: True)
    monkeypatch.setattr(softmax, "why_not_compiled_triton", lambda: None)
    with FakeTensorMode():
        yield


def gpu_choice(
    n: int = 1,
    group: int = 4,
    width: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    gradient: bool = False,
    documents: bool = False,
    **options: Any,
) -> dispatch.Choice:
    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="cuda", requires_grad=gradient)

    q, t, v = empty(1, 2 * group, n, width), empty(1, 2, 100, width // 2), empty(1, 2, 100, width)
    if documents:
        options["documents"] = torch.zeros(1, 100, dtype=torch.long, device="cuda")
    return explain(coca_attention, q, t, v, **{"rotary": Rotary(width), **options})


@needs_triton
@pytest.mark.usefixtures("ampere")
def test_auto_takes_the_kernels_on_a_gpu() -> None:
    assert gpu_choice() == ("decode_triton", {}, None)
    assert gpu_choice(rotary=None).name == "decode_triton"
    assert gpu_choice(backend="triton") == ("decode_triton", {}, None)
    assert gpu_choice(backend="sdpa").name == "sdpa"
    assert gpu_choice(n=50).name == "fused"
    assert gpu_choice(n=50, gradient=True).name == "fused"
    assert gpu_choice(n=50, rotary=None).skipped["fused"] == "nothing rotates"


@needs_triton
@pytest.mark.usefixtures("ampere")
def test_auto_asks_for_an_ampere_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (softmax, coca_decode):
        monkeypatch.setattr(module, "is_ampere", lambda *_: False)
    choice = gpu_choice()
    assert choice.name == "sdpa"
    assert "Nvidia GPUs from Ampere on" in choice.skipped["decode_triton"]
    assert choice.skipped["fused"] == "the kernel needs an Nvidia GPU from Ampere on"
    assert gpu_choice(backend="triton").name == "decode_triton"


UNTIMED = "the half-width kernel is chosen for bfloat16 heads of width 64 or 128 on Nvidia GPUs from Ampere on"
ROWS = "the half-width kernel takes at most 8 queries per key head; more are faster on rotated keys"
ELSEWHERE = "the half-width kernel takes causal calls without windows and documents"


@needs_triton
@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize(
    ("change", "reason", "auto", "asked"),
    [
        ({"dtype": torch.float32}, UNTIMED, "fused", "decode_triton"),
        ({"width": 96}, UNTIMED, "fused", "decode_triton"),
        ({"gradient": True}, "the half-width kernel has no gradients; decode under torch", "fused", "fused"),
        ({"documents": True}, ELSEWHERE, "fused", "fused"),
        ({"window": 9}, ELSEWHERE, "fused", "fused"),
        ({"n": 3}, ROWS, "fused", "fused"),
        ({"group": 9}, ROWS, "fused", "fused"),
        ({"width": 258}, UNTIMED, "sdpa", "fused"),
    ],
    ids=str,
)
def test_what_the_half_width_kernel_does_not_run(change: dict[str, Any], reason: str, auto: str, asked: str) -> None:
    choice = gpu_choice(**change)
    assert choice.name == auto
    assert choice.skipped["decode_triton"].startswith(reason)
    assert gpu_choice(**change, backend="triton").name == asked


@needs_triton
@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_what_neither_kernel_can_run_raises(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"takes float32 or bfloat16, got {dtype}; use backend='sdpa'"):
        gpu_choice(dtype=dtype, backend="triton")


@needs_triton
@pytest.mark.parametrize(
    ("op", "given", "options", "other"),
    [
        (coca_attention, coca_inputs, {"rotary": Rotary(8)}, "sdpa"),
        (cosformer_attention, softmax_inputs, {"max_length": 20}, "chunked"),
    ],
)
def test_forward_derivatives_raise_rather_than_be_zero(op: Any, given: Any, options: Any, other: str) -> None:
    leaves = tuple(x.detach().float().to(DEVICE) for x in given(20))
    _, tangent = torch.func.jvp(lambda *leaves: op(*leaves, **options, backend="reference"), leaves, leaves)
    assert tangent.abs().sum() > 0
    with pytest.raises(ValueError, match=f"no forward-mode derivatives; use backend='{other}'"):
        torch.func.jvp(lambda *leaves: op(*leaves, **options, backend="triton"), leaves, leaves)


@needs_triton
@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float16}, "the feature kernel takes bfloat16 and float32, got torch.float16"),
        ({"dtype": torch.float64}, "the kernel takes bfloat16, float16 and float32, got torch.float64"),
        ({"width": 512}, "the feature kernel takes heads up to 256 wide"),
    ],
    ids=str,
)
def test_what_the_feature_kernel_leaves_to_torch(change: dict[str, Any], reason: str) -> None:
    choice = gpu_choice(n=50, **change)
    assert choice.name == "sdpa"
    assert choice.skipped["fused"] == reason


def test_transforms_of_torch_func_keep_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "is_ampere", lambda *_: True)
    monkeypatch.setattr(softmax, "why_not_compiled_triton", lambda: None)
    on_gpu = (torch.float32, 64, torch.device("cuda", 0))
    assert coca.why_not_feature_kernel(*on_gpu) is None
    found = []

    def look(x: Tensor) -> Tensor:
        found.append(str(coca.why_not_feature_kernel(*on_gpu)))
        return x.sum()

    x = torch.ones(2, 3)
    torch.func.vmap(look)(x)
    torch.func.grad(look)(x)
    torch.func.jvp(look, (x,), (x,))
    assert ["torch.func" in reason for reason in found[:2]] == [True, True]
    assert "forward-mode" in found[2]


@needs_triton
def test_without_the_interpreter_a_cpu_raises_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    from farspan.ops import device

    monkeypatch.setattr(device, "_interpreted", lambda: False)
    with pytest.raises(ValueError, match=r"^backend='triton' needs CUDA tensors, got cpu; set TRITON_INTERPRET=1"):
        coca_attention(*inputs(1), rotary=Rotary(8), backend="triton")
    monkeypatch.setattr(device, "_interpreted", lambda: None)
    with pytest.raises(ValueError, match=r"^backend='triton' needs triton; install farspan\[gpu\]"):
        coca_attention(*inputs(1), rotary=Rotary(8), backend="triton")
