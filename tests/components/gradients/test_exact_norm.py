"""The total norm of gradients, for any sharding."""

import math
from collections.abc import Callable
from fractions import Fraction

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawloom.components.gradients.exact_norm import compute_exact_norm
from drawloom.kernels.gradients.eager import scale_and_sum_squares

numbers = st.floats(allow_nan=False, allow_infinity=False, width=32)
CPU = torch.device("cpu")


@attrs.define
class Ranks:
    """A reduction over ranks with known totals."""

    others: list[Tensor] = attrs.field(factory=list)
    given: list[Tensor] = attrs.field(factory=list)

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        self.given.append(value)
        return torch.stack([value, *self.others]).sum(0)

    def max_over_ranks(self, value: Tensor) -> Tensor:
        return value


Norm = Callable[[list[Tensor], Ranks], float]


def _exact(gradients: list[Tensor], ranks: Ranks) -> float:
    return compute_exact_norm(gradients, ranks, CPU).item()


def _on_device(gradients: list[Tensor], ranks: Ranks) -> float:
    one = torch.ones((), dtype=torch.float64)
    norm = ranks.sum_over_ranks(scale_and_sum_squares(gradients, one, [True] * len(gradients))).sqrt()
    assert norm.dtype == torch.float64 and norm.shape == ()
    return float(norm)


both = pytest.mark.parametrize("norm", [_exact, _on_device], ids=["exact", "device"])


def _over_ranks(gradients: list[Tensor], owners: list[int], norm: Norm = _exact) -> list[float]:
    """Compute the norm on three ranks with these gradients."""
    rank_gradients = [
        [gradient for gradient, owner in zip(gradients, owners, strict=True) if owner == rank] for rank in range(3)
    ]
    told = [Ranks() for _ in rank_gradients]
    for rank, own in zip(told, rank_gradients, strict=True):
        norm(own, rank)
    sent = [rank.given[0] for rank in told]
    return [norm(own, Ranks(sent[:rank] + sent[rank + 1 :])) for rank, own in enumerate(rank_gradients)]


@given(st.lists(st.tuples(st.lists(numbers, max_size=3), st.integers(0, 2)), max_size=8), st.randoms())
def test_any_sharding_gives_the_same_bits(owned_values: list[tuple[list[float], int]], moments: object) -> None:
    """On one rank or three, in any order, the norm is the root of the exactly summed squares."""
    gradients = [torch.tensor(values) for values, _ in owned_values]
    whole = _exact(gradients, Ranks())
    assert _over_ranks(gradients, [owner for _, owner in owned_values]) == [whole] * 3
    assert _exact(gradients[::-1], Ranks()) == whole
    norms = [float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) for gradient in gradients]
    assert whole == math.sqrt(float(sum(Fraction(norm * norm) for norm in norms)))


def test_small_gradients_are_not_lost_beside_a_large_one() -> None:
    """4000 squares, too small to change 1 in float64 one by one, change the norm together."""
    gradients = [torch.tensor([1.0]), *[torch.tensor([2.0**-27])] * 4096]
    assert _exact(gradients, Ranks()) == math.sqrt(1 + 2.0**-42)


@given(st.lists(st.tuples(st.lists(numbers, max_size=3), st.integers(0, 2)), max_size=8))
def test_the_norm_on_the_device_is_the_exact_one_to_rounding(owned_values: list[tuple[list[float], int]]) -> None:
    """On one rank or three, it differs by rounding in float64."""
    gradients = [torch.tensor(values) for values, _ in owned_values]
    norms = [_on_device(gradients, Ranks()), *_over_ranks(gradients, [owner for _, owner in owned_values], _on_device)]
    assert norms == pytest.approx([_exact(gradients, Ranks())] * 4, rel=1e-14, abs=0)


@both
@pytest.mark.parametrize(("value", "total"), [(math.inf, math.inf), (-math.inf, math.inf), (math.nan, math.nan)])
def test_a_non_finite_gradient_shows_on_every_rank(value: float, total: float, norm: Norm) -> None:
    """One non-finite element on one rank makes the norm non-finite on all."""
    norms = _over_ranks([torch.tensor([1.0, 2.0]), torch.tensor([value]), torch.tensor([1.0])], [0, 1, 2], norm)
    assert [repr(norm_of_rank) for norm_of_rank in norms] == [repr(total)] * 3


@both
def test_the_largest_gradients_are_finite(norm: Norm) -> None:
    """Squares of the largest float32 don't overflow."""
    largest = torch.finfo(torch.float32).max
    assert norm([torch.full((4,), largest)] * 4, Ranks()) == largest * 4


@both
def test_without_gradients_the_norm_is_zero(norm: Norm) -> None:
    """A rank without parameters has a norm of zero."""
    assert norm([], Ranks()) == 0.0
