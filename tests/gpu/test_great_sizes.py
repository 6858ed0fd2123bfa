"""Kernels on tensors whose last elements lie more than 2^31 behind the first: these take about 30 GiB, one by one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from drawloom.kernels.adamw import AdamwEager, ParamState, step_scalars
from drawloom.kernels.cut_cross_entropy import LogitCut
from drawloom.kernels.rms_norm import rms_norm_eager
from drawloom.kernels.rope import rope_eager
from drawloom.kernels.rope_frequencies import rope_angles
from drawloom.kernels.stochastic_copy import stochastic_copy_eager
from drawloom.kernels.swiglu import swiglu_eager
from drawloom.kernels.triton.adamw import AdamwTriton
from drawloom.kernels.triton.cut_cross_entropy import cut_cross_entropy_triton
from drawloom.kernels.triton.grouped_gemm import grouped_gemm_triton
from drawloom.kernels.triton.linear_cross_entropy import linear_cross_entropy_triton
from drawloom.kernels.triton.moe_permute import moe_permute_triton, moe_unpermute_triton
from drawloom.kernels.triton.moe_routes import moe_routes_triton
from drawloom.kernels.triton.rms_norm import rms_norm_triton
from drawloom.kernels.triton.rope import rope_triton
from drawloom.kernels.triton.stochastic_copy import stochastic_copy_triton
from drawloom.kernels.triton.sum_parts import sum_parts_triton
from drawloom.kernels.triton.swiglu import swiglu_triton

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("great"), pytest.mark.usefixtures("room")]

GPU: Any = {"device": "cuda", "dtype": torch.bfloat16}
WIDTH = 4096
ROWS = 2**31 // WIDTH + 5
"""A little more than 2^31 elements; the last rows lie beyond."""

LAST = slice(-5, None)
CLOSE: Any = {"atol": 0.02, "rtol": 0.02}


def filled(*shape: int) -> Tensor:
    """Numbers at the end of a great tensor, and none in the rest of it: what is beyond is what counts."""
    made = torch.zeros(shape, **GPU)
    made[LAST] = torch.randn(made[LAST].shape, **GPU)
    return made


def test_swiglu_beyond_32_bits() -> None:
    """Results and gradients at the end of great tensors are right, contiguous or not."""
    gate, up = filled(ROWS, WIDTH).requires_grad_(), filled(ROWS, WIDTH).requires_grad_()
    found = swiglu_triton(gate, up)
    small = [x.detach()[LAST].requires_grad_() for x in (gate, up)]
    expected = swiglu_eager(*small)
    torch.testing.assert_close(found[LAST], expected, **CLOSE)
    grads = torch.autograd.grad(found, (gate, up), torch.ones_like(found))
    for ours, theirs in zip(grads, torch.autograd.grad(expected.sum(), small), strict=True):
        torch.testing.assert_close(ours[LAST], theirs, **CLOSE)


def test_rms_norm_beyond_32_bits() -> None:
    """The same for the norm, whose weight's gradient sums over all rows."""
    x, weight = filled(ROWS, WIDTH).requires_grad_(), torch.randn(WIDTH, **GPU).requires_grad_()
    found = rms_norm_triton(x, weight, 1e-6)
    small = x.detach()[LAST].requires_grad_()
    expected = rms_norm_eager(small, weight, 1e-6)
    torch.testing.assert_close(found[LAST], expected, **CLOSE)
    grads = torch.autograd.grad(found, (x, weight), torch.ones_like(found))
    exact = torch.autograd.grad(expected.sum(), (small, weight))
    torch.testing.assert_close(grads[0][LAST], exact[0], **CLOSE)
    torch.testing.assert_close(grads[1], exact[1], atol=0.1, rtol=0.02)


def test_rope_beyond_32_bits() -> None:
    """The same for rotations, of which the last are in the last heads of the last positions."""
    length = ROWS
    x = filled(length, 32, 128).unsqueeze(0)
    cos, sin = rope_angles(torch.arange(length, device="cuda").unsqueeze(0), 128, 1e6)
    found = rope_triton(x, cos, sin)
    expected = rope_eager(x[:, LAST], cos[:, LAST], sin[:, LAST])
    torch.testing.assert_close(found[:, LAST], expected, **CLOSE)


def test_rounding_beyond_32_bits() -> None:
    """Noise belongs to the element's place also there; the step changes what is there."""
    count, tail = 2**31 + 4096, 4096
    source = torch.randn(tail, device="cuda")
    great = torch.zeros(count, device="cuda")
    great[-tail:] = source
    found, expected = torch.zeros(count, **GPU), torch.zeros(tail, **GPU)
    stochastic_copy_triton(found, great, 3, 4)
    stochastic_copy_eager(expected, source, 3, 4, count - tail)
    assert torch.equal(found[-tail:], expected)
    del great
    kept = [torch.zeros(count, **GPU) for _ in "ms"]
    AdamwTriton([ParamState(found, kept[0], kept[1], 0.1, 9)]).step(
        [torch.ones(count, **GPU)], step_scalars(1e-2, (0.9, 0.95), 1e-8, 1), 1
    )
    small = [torch.zeros(tail, **GPU) for _ in "ms"]
    AdamwEager([ParamState(expected, small[0], small[1], 0.1, 9, count - tail)]).step(
        [torch.ones(tail, **GPU)], step_scalars(1e-2, (0.9, 0.95), 1e-8, 1), 1
    )
    assert torch.equal(found[-tail:], expected)
    assert torch.equal(kept[1][-tail:], small[1])


def test_sums_of_parts_beyond_32_bits() -> None:
    """Also rows that begin there are added."""
    rows, size = 3, 2**30 + 8
    parts, found = torch.zeros(rows, size, **GPU), torch.zeros(size, **GPU)
    parts[:, LAST] = torch.tensor([[1.0], [2.0], [4.0]], **GPU)
    sum_parts_triton(found.clone(), parts, found)
    assert torch.equal(found[LAST], torch.full_like(found[LAST], 7.0))
    assert not found[:-5].any()


def test_experts_beyond_32_bits() -> None:
    """Rows of tokens, and their products, are right where their offsets need more than 32 bits."""
    tokens, choices = ROWS // 8 + 1, 8
    x = filled(tokens, WIDTH)
    expert_indices = torch.arange(choices, device="cuda").expand(tokens, choices)
    routes, probabilities = moe_routes_triton(expert_indices, choices), torch.ones(tokens, choices, device="cuda")
    rows, _ = moe_permute_triton(x, probabilities, routes)
    assert rows.numel() > 2**31
    assert torch.equal(rows[LAST], x[LAST])
    back = moe_unpermute_triton(rows, routes)
    torch.testing.assert_close(back[LAST], 8 * x[LAST], **CLOSE)
    weight = torch.randn(choices, WIDTH, 64, **GPU) / 64
    product = grouped_gemm_triton(rows, weight, routes.offsets)
    torch.testing.assert_close(product[LAST], x[LAST] @ weight[-1], **CLOSE)


def test_losses_beyond_32_bits() -> None:
    """Words whose rows of the weight lie there have their logits and their gradients."""
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
