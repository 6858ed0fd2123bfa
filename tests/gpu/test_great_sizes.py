"""Kernels on tensors with more than 2^31 elements; a test needs about 30 GiB."""

from typing import Any

import pytest
import torch
from torch import Tensor

from drawloom.kernels.adamw.eager import AdamwEager, ParamState, compute_step_scalars
from drawloom.kernels.adamw.triton import AdamwTriton
from drawloom.kernels.cross_entropy.options import LogitCut
from drawloom.kernels.cross_entropy.triton import cut_cross_entropy_triton, linear_cross_entropy_triton
from drawloom.kernels.gates.eager import swiglu_eager
from drawloom.kernels.gates.triton import swiglu_triton
from drawloom.kernels.gradients.triton import sum_parts_triton
from drawloom.kernels.grouped_gemm.triton import grouped_gemm_triton
from drawloom.kernels.moe.triton import moe_permute_triton, moe_routes_triton, moe_unpermute_triton
from drawloom.kernels.rms_norm.eager import rms_norm_eager
from drawloom.kernels.rms_norm.triton import rms_norm_triton
from drawloom.kernels.rope.eager import rope_eager
from drawloom.kernels.rope.frequencies import compute_rope_cos_and_sin
from drawloom.kernels.rope.triton import rope_triton

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("great"), pytest.mark.usefixtures("room")]

GPU: Any = {"device": "cuda", "dtype": torch.bfloat16}
WIDTH = 4096
ROWS = 2**31 // WIDTH + 5
"""Rows for slightly more than 2^31 elements."""

LAST = slice(-5, None)
TOLERANCE: Any = {"atol": 0.02, "rtol": 0.02}


def fill_end(*shape: int) -> Tensor:
    """Return a large tensor with random numbers only at its end, beyond 2^31 elements."""
    tensor = torch.zeros(shape, **GPU)
    tensor[LAST] = torch.randn(tensor[LAST].shape, **GPU)
    return tensor


def test_swiglu_is_right_beyond_32_bits() -> None:
    """SwiGLU's results and gradients are right at the end of large tensors."""
    gate, up = fill_end(ROWS, WIDTH).requires_grad_(), fill_end(ROWS, WIDTH).requires_grad_()
    result = swiglu_triton(gate, up)
    small = [x.detach()[LAST].requires_grad_() for x in (gate, up)]
    expected = swiglu_eager(*small)
    torch.testing.assert_close(result[LAST], expected, **TOLERANCE)
    grads = torch.autograd.grad(result, (gate, up), torch.ones_like(result))
    for ours, theirs in zip(grads, torch.autograd.grad(expected.sum(), small), strict=True):
        torch.testing.assert_close(ours[LAST], theirs, **TOLERANCE)


def test_rms_norm_is_right_beyond_32_bits() -> None:
    """RMSNorm's results and gradients are right at the end; the weight's gradient sums over all rows."""
    x, weight = fill_end(ROWS, WIDTH).requires_grad_(), torch.randn(WIDTH, **GPU).requires_grad_()
    result = rms_norm_triton(x, weight, 1e-6)
    small = x.detach()[LAST].requires_grad_()
    expected = rms_norm_eager(small, weight, 1e-6)
    torch.testing.assert_close(result[LAST], expected, **TOLERANCE)
    grads = torch.autograd.grad(result, (x, weight), torch.ones_like(result))
    exact = torch.autograd.grad(expected.sum(), (small, weight))
    torch.testing.assert_close(grads[0][LAST], exact[0], **TOLERANCE)
    torch.testing.assert_close(grads[1], exact[1], atol=0.1, rtol=0.02)


def test_rope_is_right_beyond_32_bits() -> None:
    """Rotations are right at the last positions."""
    length = ROWS
    x = fill_end(length, 32, 128).unsqueeze(0)
    cos, sin = compute_rope_cos_and_sin(torch.arange(length, device="cuda").unsqueeze(0), 128, 1e6)
    result = rope_triton(x, cos, sin)
    expected = rope_eager(x[:, LAST], cos[:, LAST], sin[:, LAST])
    torch.testing.assert_close(result[:, LAST], expected, **TOLERANCE)


def test_stochastic_rounding_is_right_beyond_32_bits() -> None:
    """Noise depends on the element's index, and AdamW updates the last elements."""
    count, tail = 2**31 + 4096, 4096
    expected = torch.randn(tail, **GPU)
    result = torch.zeros(count, **GPU)
    result[-tail:] = expected
    kept = [torch.zeros(count, **GPU) for _ in "ms"]
    AdamwTriton([ParamState(result, kept[0], kept[1], 0.1, 9)]).step(
        [torch.ones(count, **GPU)], compute_step_scalars(1e-2, (0.9, 0.95), 1e-8, 1), 1
    )
    small = [torch.zeros(tail, **GPU) for _ in "ms"]
    AdamwEager([ParamState(expected, small[0], small[1], 0.1, 9, count - tail)]).step(
        [torch.ones(tail, **GPU)], compute_step_scalars(1e-2, (0.9, 0.95), 1e-8, 1), 1
    )
    assert torch.equal(result[-tail:], expected)
    assert torch.equal(kept[1][-tail:], small[1])


def test_sums_of_parts_are_right_beyond_32_bits() -> None:
    """Rows that start beyond 2^31 elements are added."""
    rows, size = 3, 2**30 + 8
    parts, total = torch.zeros(rows, size, **GPU), torch.zeros(size, **GPU)
    parts[:, LAST] = torch.tensor([[1.0], [2.0], [4.0]], **GPU)
    sum_parts_triton(total.clone(), parts, total)
    assert torch.equal(total[LAST], torch.full_like(total[LAST], 7.0))
    assert not total[:-5].any()


def test_experts_are_right_beyond_32_bits() -> None:
    """Permuted rows and grouped products are right at offsets of more than 32 bits."""
    tokens, choices = ROWS // 8 + 1, 8
    x = fill_end(tokens, WIDTH)
    expert_indices = torch.arange(choices, device="cuda").expand(tokens, choices)
    routes, probabilities = moe_routes_triton(expert_indices, choices), torch.ones(tokens, choices, device="cuda")
    rows, _ = moe_permute_triton(x, probabilities, routes)
    assert rows.numel() > 2**31
    assert torch.equal(rows[LAST], x[LAST])
    back = moe_unpermute_triton(rows, routes)
    torch.testing.assert_close(back[LAST], 8 * x[LAST], **TOLERANCE)
    weight = torch.randn(choices, WIDTH, 64, **GPU) / 64
    product = grouped_gemm_triton(rows, weight, routes.offsets)
    torch.testing.assert_close(product[LAST], x[LAST] @ weight[-1], **TOLERANCE)


def test_losses_are_right_beyond_32_bits() -> None:
    """Losses and gradients are right for the last rows of a large head."""
    words, width = 2**31 // 2048 + 100, 2048
    weight = torch.zeros(words, width, **GPU)
    weight[-3:] = torch.randn(3, width, **GPU) / 32
    weight.requires_grad_()
    hidden, targets = torch.randn(16, width, **GPU).requires_grad_(), torch.full((16,), words - 1, device="cuda")
    for compute in (
        linear_cross_entropy_triton,
        cut_cross_entropy_triton,
        lambda h, w, t: cut_cross_entropy_triton(h, w, t, LogitCut(filter_eps=1e-7)),
    ):
        losses, _ = compute(hidden, weight, targets)
        logits = (hidden @ weight[-3:].T).float()
        others = torch.tensor(words - 3.0, device="cuda").log().expand(16, 1)
        exact = torch.cat((logits, others), 1).logsumexp(1) - logits[:, 2]
        torch.testing.assert_close(losses, exact, atol=0.02, rtol=0.01)
        (grad,) = torch.autograd.grad(losses.sum(), weight)
        torch.testing.assert_close(grad[-1].float(), -hidden.sum(0).float(), atol=0.1, rtol=0.05)
