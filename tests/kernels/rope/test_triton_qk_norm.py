"""qk_norm_rope in Triton against the eager implementation in float64."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawloom.kernels.rope.eager import qk_norm_rope_eager
from drawloom.kernels.rope.frequencies import compute_rope_cos_and_sin
from drawloom.kernels.rope.triton import qk_norm_rope_triton
from support.kernels import DEVICE, assert_all_close, draw_tensor, dtypes, exact, few, layouts
from support.seeding import seeds


@few
@given(
    seeds,
    st.tuples(st.integers(0, 2), st.integers(0, 4)),
    st.tuples(st.integers(1, 5), st.integers(1, 3)),
    st.integers(1, 9),
    dtypes,
    layouts,
    layouts,
)
def test_triton_equals_eager(
    _seed: object,
    tokens: tuple[int, int],
    heads: tuple[int, int],
    pairs: int,
    dtype: torch.dtype,
    layout: str,
    of_grad: str,
) -> None:
    """Any shape and strides, also with fewer key heads, agree with float64 in results and gradients."""
    inputs: Any = [draw_tensor(layout, *tokens, count, 2 * pairs, dtype=dtype) for count in heads]
    inputs += [draw_tensor("contiguous", 2 * pairs) for _ in "qk"]
    cos, sin = compute_rope_cos_and_sin(torch.randint(0, 5000, tokens, device=DEVICE), 2 * pairs, 1e4)
    grads = [draw_tensor(of_grad, *tokens, count, 2 * pairs, dtype=dtype).detach() for count in heads]
    q, k, q_weight, k_weight = wide = exact(*inputs)
    actual = qk_norm_rope_triton(inputs[0], inputs[1], inputs[2], inputs[3], 0.1, cos, sin)
    expected = qk_norm_rope_eager(q, k, q_weight, k_weight, 0.1, cos.double(), sin.double())
    assert [x.dtype for x in actual] == [dtype, dtype]
    assert_all_close(actual, expected, 4)
    result = torch.autograd.grad(actual, inputs, grads)
    assert_all_close(result, torch.autograd.grad(expected, wide, [grad.double() for grad in grads]), 8)


def sum_cubes(results: tuple[Tensor, Tensor]) -> Tensor:
    """Return a number whose gradients differ by element."""
    return torch.stack([(x * x * x).sum() for x in results]).sum()


def test_programs_process_many_tiles() -> None:
    """More vectors than programs process at once give float64, and gradients are bitwise the same twice."""
    inputs: Any = [draw_tensor("contiguous", 2, 60, heads, 64) for heads in (6, 2)]
    inputs += [draw_tensor("contiguous", 64) for _ in "qk"]
    cos, sin = compute_rope_cos_and_sin(torch.randint(0, 5000, (2, 60), device=DEVICE), 64, 1e4)
    q, k, q_weight, k_weight = wide = exact(*inputs)
    expected = qk_norm_rope_eager(q, k, q_weight, k_weight, 1e-6, cos.double(), sin.double())
    exact_grads = torch.autograd.grad(sum_cubes(expected), wide)
    runs = []
    for _ in range(2):
        actual = qk_norm_rope_triton(inputs[0], inputs[1], inputs[2], inputs[3], 1e-6, cos, sin)
        runs.append(torch.autograd.grad(sum_cubes(actual), inputs))
    assert_all_close(actual, expected, 4)
    assert_all_close(runs[0], exact_grads, 16)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_operators_pass_opcheck() -> None:
    """Both directions pass torch.library.opcheck, which torch.compile relies on."""
    q, k = (torch.randn(2, 3, heads, 8, device=DEVICE) for heads in (4, 2))
    cos, sin = compute_rope_cos_and_sin(torch.arange(3, device=DEVICE).expand(2, 3), 8, 1e4)
    weights, inverses = torch.randn(2, 8, device=DEVICE), [torch.rand(2, 3, heads, device=DEVICE) for heads in (4, 2)]
    torch.library.opcheck(torch.ops.drawloom.qk_norm_rope.default, (q, k, *weights.clone(), 1e-6, cos, sin))
    arguments = (q, k, q, k, weights[0].clone(), weights[1].clone(), 1e-6, cos, sin, *inverses)
    torch.library.opcheck(torch.ops.drawloom.qk_norm_rope_backward.default, arguments)
