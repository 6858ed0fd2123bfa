"""geglu and gpt-oss's clamped swiglu against their formulas, and gradients against finite differences."""

import pytest
import torch
from torch import Tensor

from drawloom.kernels.gates.eager import geglu_eager, oss_swiglu_halves_eager


def gelu(x: Tensor) -> Tensor:
    x = x.double()
    return x * (1 + (0.7978845608028654 * (x + 0.044715 * x**3)).tanh()) / 2


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 0, 4)])
def test_geglu_equals_its_formula(shape: tuple[int, ...]) -> None:
    """Every shape, also without rows, gives gelu(gate) * up."""
    gate, up = torch.randn(shape) * 4, torch.randn(shape)
    torch.testing.assert_close(geglu_eager(gate, up).double(), gelu(gate) * up.double(), atol=1e-6, rtol=1e-5)


def test_clamped_swiglu_equals_its_formula() -> None:
    """The gate has an upper bound, up has two, and a scale multiplies vectors."""
    both, scale = torch.randn(2, 3, 10, dtype=torch.float64) * 3, torch.randn(2, 3, dtype=torch.float64)
    gate, up = both.chunk(2, -1)
    gate, up = (
        torch.minimum(gate, torch.tensor(1.5)),
        torch.minimum(torch.maximum(up, -torch.tensor(1.5)), torch.tensor(1.5)),
    )
    expected = (up + 1) * gate / (1 + (-1.7 * gate).exp())
    torch.testing.assert_close(oss_swiglu_halves_eager(both, None, 1.7, 1.5), expected)
    torch.testing.assert_close(oss_swiglu_halves_eager(both, scale, 1.7, 1.5), expected * scale.unsqueeze(-1))


def test_gradients_match_finite_differences() -> None:
    """All gradients equal finite differences in float64, also where bounds cut results off."""
    gate, up = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(geglu_eager, (gate, up))
    both, scale = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 8), (3,)))
    assert torch.autograd.gradcheck(lambda x, y: oss_swiglu_halves_eager(x, y, 1.7, 0.8), (both, scale))
