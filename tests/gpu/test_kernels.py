"""Properties of kernels that only a GPU shows: CUDA graphs, bitwise repeatability, and no waiting."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from drawloom.kernels.adamw.eager import ParamState, compute_step_scalars
from drawloom.kernels.adamw.triton import AdamwTriton
from drawloom.kernels.cross_entropy.options import LogitCut
from drawloom.kernels.cross_entropy.triton import cut_cross_entropy_triton, linear_cross_entropy_triton
from drawloom.kernels.gates.triton import swiglu_triton
from drawloom.kernels.grouped_gemm.eager import grouped_gemm_torch
from drawloom.kernels.grouped_gemm.triton import grouped_gemm_triton
from drawloom.kernels.moe.eager import moe_routes_eager
from drawloom.kernels.moe.triton import moe_permute_triton, moe_routes_triton, moe_unpermute_triton
from drawloom.kernels.rms_norm.triton import add_rms_norm_triton, rms_norm_triton
from drawloom.kernels.rope.frequencies import compute_rope_cos_and_sin
from drawloom.kernels.rope.triton import qk_norm_rope_triton, rope_triton

pytestmark = pytest.mark.gpu

GPU: Any = {"device": "cuda", "dtype": torch.bfloat16}


def expert_layer(
    x: Tensor, weight: Tensor, down: Tensor, expert_indices: Tensor, gemm: Callable[..., Tensor]
) -> Tensor:
    """Compute a layer of experts from expert choices to its output."""
    routes = moe_routes_triton(expert_indices, len(weight))
    probabilities = torch.ones(expert_indices.shape, device="cuda") / expert_indices.shape[1]
    rows, row_probabilities = moe_permute_triton(x, probabilities, routes)
    gate_and_up = gemm(rows, weight, routes.offsets)
    gate, up = gate_and_up.chunk(2, -1)
    gated = swiglu_triton(gate, up, row_probabilities)
    return moe_unpermute_triton(gemm(gated, down, routes.offsets), routes)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("gemm", [grouped_gemm_triton, grouped_gemm_torch])
def test_experts_never_wait_for_the_device(gemm: Callable[..., Tensor]) -> None:
    """Forward and backward of a layer of experts never synchronize with the device, also if experts have no tokens."""
    x, weight = torch.randn(300, 256, **GPU).requires_grad_(), torch.randn(16, 256, 256, **GPU).requires_grad_()
    down, expert_indices = (
        torch.randn(16, 128, 256, **GPU).requires_grad_(),
        torch.randint(3, 9, (300, 4), device="cuda"),
    )
    torch.autograd.grad(expert_layer(x, weight, down, expert_indices, gemm).sum(), (x, weight, down))  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        grads = torch.autograd.grad(expert_layer(x, weight, down, expert_indices, gemm).sum(), (x, weight, down))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(grad.isfinite().all() for grad in grads)


def test_routes_equal_the_eager_implementation() -> None:
    """Routes equal those of the eager implementation at the size of a real layer."""
    expert_indices = torch.rand(32768, 128, device="cuda").topk(8, 1).indices
    routes, expected = moe_routes_triton(expert_indices, 128), moe_routes_eager(expert_indices, 128)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(routes, expected, strict=True))


def make_calls() -> dict[str, Callable[[], Any]]:
    """Return a call per kernel, forward and backward."""
    x, weight = torch.randn(64, 256, **GPU).requires_grad_(), torch.randn(256, **GPU).requires_grad_()
    q, k = torch.randn(2, 32, 4, 64, **GPU).requires_grad_(), torch.randn(2, 32, 2, 64, **GPU).requires_grad_()
    q_weight, k_weight = torch.randn(64, **GPU).requires_grad_(), torch.randn(64, **GPU).requires_grad_()
    angles = compute_rope_cos_and_sin(torch.arange(32, device="cuda").expand(2, 32), 64, 1e4)
    matrix, targets = torch.randn(1000, 256, **GPU).requires_grad_(), torch.randint(1000, (64,), device="cuda")
    up, down = torch.randn(4, 256, 512, **GPU).requires_grad_(), torch.randn(4, 256, 256, **GPU).requires_grad_()
    expert_indices = torch.randint(-1, 4, (64, 2), device="cuda")
    kept = [torch.zeros(256, **GPU) for _ in "wms"]
    (_, launch), *_ = AdamwTriton([ParamState(kept[0], kept[1], kept[2], 0.1, 1)])._launches
    scalars = compute_step_scalars(1e-3, (0.9, 0.95), 1e-8, 1)
    nearest, noisy = launch.upload_scalars(scalars, None), launch.upload_scalars(scalars, 1)
    ones = torch.ones(256, **GPU)

    def grad(result: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        results = [result] if isinstance(result, Tensor) else list(result)
        return torch.autograd.grad(results, inputs, [torch.ones_like(tensor) for tensor in results])

    return {
        "rms_norm": lambda: grad(rms_norm_triton(x, weight, 1e-6), x, weight),
        "add_rms_norm": lambda: grad(add_rms_norm_triton(x, x, weight, 1e-6), x, weight),
        "swiglu": lambda: grad(swiglu_triton(x, x), x),
        "rope": lambda: grad(rope_triton(q, *angles), q),
        "qk_norm_rope": lambda: grad(
            qk_norm_rope_triton(q, k, q_weight, k_weight, 1e-6, *angles), q, k, q_weight, k_weight
        ),
        "linear_cross_entropy": lambda: grad(linear_cross_entropy_triton(x, matrix, targets), x, matrix),
        "cut": lambda: grad(cut_cross_entropy_triton(x, matrix, targets), x, matrix),
        "filtered": lambda: grad(cut_cross_entropy_triton(x, matrix, targets, LogitCut(filter_eps=1e-4)), x, matrix),
        "experts": lambda: grad(expert_layer(x, up, down, expert_indices, grouped_gemm_triton.__call__), x, up, down),
        "adamw": lambda: launch.run([ones], *nearest),
        "adamw, stochastic": lambda: launch.run([ones], *noisy),
    }


NAMES = ["rms_norm", "add_rms_norm", "swiglu", "rope", "qk_norm_rope", "linear_cross_entropy", "cut", "filtered"]


@pytest.mark.parametrize("name", [*NAMES, "experts", "adamw", "adamw, stochastic"])
def test_kernel_can_be_captured_in_a_cuda_graph(name: str) -> None:
    """A captured and replayed operation has the results of a normal call."""
    call = make_calls()[name]
    expected = call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    graph.replay()
    torch.cuda.synchronize()
    if isinstance(results, tuple):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(results, expected, strict=True))


@pytest.mark.parametrize("name", [*NAMES, "experts"])
def test_gradients_are_bitwise_repeatable(name: str) -> None:
    """Repeated calls have bitwise equal gradients."""
    call: Any = make_calls()[name]
    first = call()
    for _ in range(10):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(call(), first, strict=True))
