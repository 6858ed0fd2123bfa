"""What all kernels compute: the formulas, in float64, for a few shapes."""

import torch

from drawloom.components.ports.model import Kernels
from drawloom.graph.testing import expect

CLOSE = 1e-4


def rms_norm(kernels: Kernels) -> None:
    """x / sqrt(mean(x²) + eps) * weight, over the last dimension."""
    x, weight = _random(3, 5, 16), _random(16)
    wanted = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    _expect_close(kernels.rms_norm(x, weight, 1e-6), wanted)


def swiglu(kernels: Kernels) -> None:
    """gate * sigmoid(gate) * up."""
    gate, up = _random(3, 5, 16), _random(3, 5, 16)
    _expect_close(kernels.swiglu(gate, up), gate.double() * gate.double().sigmoid() * up.double())


def rope(kernels: Kernels) -> None:
    """Each pair of the two halves of a head is turned by its angle."""
    x, angles = _random(2, 5, 3, 8), _random(2, 5, 4)
    cos, sin = angles.cos().double()[:, :, None], angles.sin().double()[:, :, None]
    first, second = x.double().chunk(2, -1)
    wanted = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    _expect_close(kernels.rope(x, angles.cos(), angles.sin()), wanted)


def attention(kernels: Kernels) -> None:
    """Softmax over earlier tokens of the same document, with groups of heads that share keys and values."""
    q, k, v = _random(2, 6, 4, 8), _random(2, 6, 2, 8), _random(2, 6, 2, 8)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1]])
    k64, v64 = (x.double().repeat_interleave(2, dim=2) for x in (k, v))
    scores = torch.einsum("rihd,rjhd->rhij", q.double(), k64) / 8**0.5
    seen = torch.ones(6, 6, dtype=torch.bool).tril() & (documents[:, :, None] == documents[:, None, :])
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    found = kernels.attention(q, k, v, kernels.attention_mask(documents))
    _expect_close(found, torch.einsum("rhij,rjhd->rihd", weights, v64))


def linear_cross_entropy(kernels: Kernels) -> None:
    """Minus the logarithm of the softmax of hidden times weight, at the target; 0 where it is ignored."""
    hidden, weight, targets = _random(3, 4, 8), _random(11, 8), torch.arange(12).reshape(3, 4) % 11
    targets[0, 1] = -100
    logarithms = (hidden.double() @ weight.double().T).log_softmax(-1)
    wanted = -logarithms.gather(-1, targets.clamp(min=0)[..., None])[..., 0].masked_fill(targets == -100, 0.0)
    _expect_close(kernels.linear_cross_entropy(hidden, weight, targets), wanted)


def nothing_is_fine(kernels: Kernels) -> None:
    """No rows give no rows."""
    expect(kernels.swiglu(_random(0, 16), _random(0, 16)).shape == (0, 16), "no rows are something")


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _expect_close(given: torch.Tensor, wanted: torch.Tensor) -> None:
    expect(given.shape == wanted.shape, f"the shape is {tuple(given.shape)}, not {tuple(wanted.shape)}")
    error = float((given.double() - wanted).abs().max())
    expect(error < CLOSE, f"the largest error is {error:.2g}")
