"""The norm of all gradients, whatever the layout."""

import math
from fractions import Fraction

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawloom.components.gradients.norm import total_norm

numbers = st.floats(allow_nan=False, allow_infinity=False, width=32)


@attrs.define
class Ranks:
    """A reduction over ranks whose totals are known."""

    others: list[Tensor] = attrs.field(factory=list)
    given: list[Tensor] = attrs.field(factory=list)

    def total(self, value: Tensor) -> Tensor:
        self.given.append(value)
        return torch.stack([value, *self.others]).sum(0)


def _over_ranks(gradients: list[Tensor], owners: list[int]) -> list[float]:
    """What each of three ranks gets that hold these gradients."""
    held = [[each for each, owner in zip(gradients, owners, strict=True) if owner == rank] for rank in range(3)]
    told = [Ranks() for _ in held]
    for rank, own in zip(told, held, strict=True):
        total_norm(own, rank)
    sent = [rank.given[0] for rank in told]
    return [total_norm(own, Ranks(sent[:rank] + sent[rank + 1 :])) for rank, own in enumerate(held)]


@given(st.lists(st.tuples(st.lists(numbers, max_size=3), st.integers(0, 2)), max_size=8), st.randoms())
def test_any_layout_gives_the_same_bits(held: list[tuple[list[float], int]], moments: object) -> None:
    """Over one rank or three, in whatever order: the root of the sum of squares as exact arithmetic has it."""
    gradients = [torch.tensor(values) for values, _ in held]
    whole = total_norm(gradients, Ranks())
    assert _over_ranks(gradients, [owner for _, owner in held]) == [whole] * 3
    assert total_norm(gradients[::-1], Ranks()) == whole
    norms = [float(torch.linalg.vector_norm(each, dtype=torch.float64)) for each in gradients]
    assert whole == math.sqrt(float(sum(Fraction(norm * norm) for norm in norms)))


def test_small_ones_are_not_lost_beside_a_large_one() -> None:
    """Four thousand of what adds nothing to one in float64, each by itself, add something together."""
    gradients = [torch.tensor([1.0]), *[torch.tensor([2.0**-27])] * 4096]
    assert total_norm(gradients, Ranks()) == math.sqrt(1 + 2.0**-42)


@pytest.mark.parametrize(("value", "norm"), [(math.inf, math.inf), (-math.inf, math.inf), (math.nan, math.nan)])
def test_what_is_not_finite_shows_on_every_rank(value: float, norm: float) -> None:
    """One element on one rank is enough."""
    found = _over_ranks([torch.tensor([1.0, 2.0]), torch.tensor([value]), torch.tensor([1.0])], [0, 1, 2])
    assert [repr(each) for each in found] == [repr(norm)] * 3


def test_the_largest_gradients_are_finite() -> None:
    """Squares of float32 are far from the end of float64."""
    largest = torch.finfo(torch.float32).max
    assert total_norm([torch.full((4,), largest)] * 4, Ranks()) == largest * 4


def test_without_gradients_the_norm_is_zero() -> None:
    """A rank may have no parameter."""
    assert total_norm([], Ranks()) == 0.0
