"""What torch.compile makes of the preparation where Triton is not interpreted (TRITON_INTERPRET=0); no GPU is needed.

Prints "forward" and "backward" for each graph that launches the kernel once and copies nothing.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


class NoGpu:
    """Stands in for a driver: a kernel is only read, to see what it writes to."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


def check(graph: fx.GraphModule, name: str, *written: str) -> fx.GraphModule:
    kernel = torch.ops.higher_order.triton_kernel_wrapper_functional
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    [launch] = [node for node in calls if node.target is kernel]
    # All else is taken as read; `q` and `t` among the written would cost a copy of each.
    assert sorted(launch.kwargs["tensors_to_clone"]) == ["k_out", *written, "q_out"], launch.kwargs["tensors_to_clone"]
    others = {str(node.target).split(".")[1] for node in calls if node.target is not kernel and "." in str(node.target)}
    assert others <= {"new_empty", "transpose", "slice", "sym_size", "sym_stride", "sum"}, others
    print(name)
    return graph


def trace(b: int, n: int, m: int, positions: bool, folded: bool, dynamic: bool, polar: bool = False) -> None:
    """Shapes as they are, or (dynamic) as letters."""
    from farspan.ops.triton.coca_features import prepare_op

    phase = torch.empty(8, 32) if polar else None
    q, t = torch.empty(b, n, 8, 32 if polar else 64), torch.empty(b, m, 2, 32)
    q, t = (x.transpose(1, 2) if folded else x.transpose(1, 2).contiguous() for x in (q.bfloat16(), t.bfloat16()))
    step, at = torch.zeros(1, 32, dtype=torch.long), torch.zeros(b, m, dtype=torch.long)

    def prepare(q: Tensor, t: Tensor, step: Tensor, at: Tensor, phase: Tensor | None) -> tuple[Tensor, Tensor]:
        first = t.shape[2] - q.shape[2]
        places = (at[:, first:], at) if positions else (None, None)
        return prepare_op(q, t, phase, step, *places, first, 0, "polar" if polar else "slack", 1.25)

    compiled = aot_function(
        prepare,
        fw_compiler=lambda graph, _: check(graph, "forward"),
        bw_compiler=lambda graph, _: check(graph, "backward", *["phase_gradient"] * polar),
    )
    with FakeTensorMode(shape_env=ShapeEnv() if dynamic else None) as mode:
        q, t, step, at = (mode.from_tensor(x) for x in (q, t, step, at))
        leaves = [q.requires_grad_(), t.requires_grad_()]
        if phase is not None:
            phase = mode.from_tensor(phase).requires_grad_()
            leaves.append(phase)
        out = compiled(*leaves[:2], step, at, phase)
        torch.autograd.grad(out, leaves, [torch.empty_like(x) for x in out])


if __name__ == "__main__":
    from triton.runtime import driver

    driver.set_active(NoGpu())
    from torch._library.triton import get_triton_kernels_for_op

    from farspan.ops.triton.coca_features import prepare_kernel

    for name in ("farspan::coca_prepare", "farspan::coca_prepare_backward"):  # else a cache would keep an old kernel
        assert get_triton_kernels_for_op(name) == [prepare_kernel], name
    trace(2, 100, 100, positions=False, folded=True, dynamic=False)
    trace(2, 100, 120, positions=False, folded=True, dynamic=True)
    trace(1, 100, 120, positions=True, folded=True, dynamic=True)
    trace(2, 1, 120, positions=True, folded=False, dynamic=False)
    trace(2, 100, 120, positions=False, folded=True, dynamic=True, polar=True)
