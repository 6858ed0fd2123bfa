"""rope in Triton against the eager one in float64, which is tested against complex numbers."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawloom.kernels.rope.eager import rope_eager
from drawloom.kernels.rope.frequencies import compute_rope_cos_and_sin
from drawloom.kernels.rope.triton import rope_triton
from support.kernels import DEVICE, assert_close, draw_tensor, dtypes, exact, few, layouts
from support.seeding import seeds

shapes = st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 5))
channels = st.integers(1, 9).flatmap(lambda pairs: st.tuples(st.just(pairs), st.integers(0, 5)))


def angles_of(rows: int, length: int, pairs: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin of positions that restart at every packed document."""
    positions = torch.randint(0, 5000, (rows, length), device=DEVICE)
    return compute_rope_cos_and_sin(positions, 2 * pairs, 1e4)


@few
@given(seeds, shapes, channels, dtypes, layouts, layouts, st.booleans())
def test_triton_equals_eager(
    _seed: object,
    shape: tuple[int, int, int],
    channels: tuple[int, int],
    dtype: torch.dtype,
    layout: str,
    of_grad: str,
    interleaved: bool,
) -> None:
    """Any shape and strides, with channels that are not rotated, give result and gradient of float64, rounded once."""
    pairs, rest = channels
    full = (*shape, 2 * pairs + rest)
    x, (cos, sin) = draw_tensor(layout, *full, dtype=dtype), angles_of(*shape[:2], pairs)
    (wide,) = exact(x)
    actual = rope_triton(x, cos, sin, interleaved)
    expected = rope_eager(wide, cos.double(), sin.double(), interleaved)
    assert actual.dtype == dtype
    assert_close(actual, expected)
    grad = draw_tensor(of_grad, *full, dtype=dtype).detach()
    (result,), (reference,) = torch.autograd.grad(actual, x, grad), torch.autograd.grad(expected, wide, grad.double())
    assert_close(result, reference)


def test_more_vectors_than_a_tile_are_rotated() -> None:
    """More vectors than a program's tile, with a number of heads that divides no tile, are all rotated."""
    x, (cos, sin) = draw_tensor("contiguous", 2, 50, 6, 64, dtype=torch.bfloat16), angles_of(2, 50, 32)
    assert_close(rope_triton(x, cos, sin), rope_eager(x.double(), cos.double(), sin.double()))


def test_angles_can_be_expanded_over_rows() -> None:
    """Angles may be expanded over rows."""
    x, (cos, sin) = draw_tensor("contiguous", 3, 4, 2, 8), angles_of(1, 4, 4)
    actual = rope_triton(x, cos.expand(3, -1, -1), sin.expand(3, -1, -1))
    assert_close(actual, rope_eager(x.double(), cos.double(), sin.double()))


def test_the_backward_pass_is_differentiable() -> None:
    """The gradient of a gradient is computed by another backward pass."""
    x, (cos, sin) = draw_tensor("contiguous", 1, 3, 2, 4), angles_of(1, 3, 2)
    grad = draw_tensor("contiguous", 1, 3, 2, 4)
    (first,) = torch.autograd.grad(rope_triton(x, cos, sin), x, grad, create_graph=True)
    (second,) = torch.autograd.grad(first, grad, x.detach())
    assert_close(second, rope_triton(x, cos, sin).detach().double())


def test_operators_pass_opcheck() -> None:
    """Both variants pass torch.library.opcheck, which torch.compile relies on."""
    x, (cos, sin) = torch.randn(2, 3, 2, 8, device=DEVICE), angles_of(2, 3, 3)
    torch.library.opcheck(torch.ops.drawloom.rope.default, (x, cos, sin, False, False))
