"""Stochastic rounding in Triton is bitwise equal to the eager implementation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drawloom.kernels.stochastic_copy.eager import stochastic_copy_eager
from drawloom.kernels.stochastic_copy.triton import stochastic_copy_triton
from support.kernels import BOUNDARIES, DEVICE, draw_tensor, few, int64s, layouts
from support.seeding import seeds


@few
@given(
    seeds,
    st.lists(st.integers(0, 40), max_size=2),
    int64s,
    int64s,
    int64s.map(lambda index: index // 16 * 8),
    layouts,
    layouts,
)
def test_triton_has_the_bits_of_eager(
    _seed: object, shape: list[int], key: int, counter: int, first: int, of_source: str, of_target: str
) -> None:
    """Copies of any shape, layout, key, counter and first index are bitwise equal to the eager implementation."""
    source = draw_tensor(of_source, *shape).detach()
    actual, expected = (draw_tensor(of_target, *shape, dtype=torch.bfloat16).detach() for _ in range(2))
    stochastic_copy_triton(actual, source, key, counter, first)
    stochastic_copy_eager(expected, source, key, counter, first)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("number", BOUNDARIES)
def test_scalars_at_boundaries_have_the_same_bits(number: int) -> None:
    """Copies with scalars at the limits of Triton's integer types are bitwise equal to the eager implementation."""
    source = torch.randn(4096, device=DEVICE)
    for key, counter, first in ((number, 3, 0), (3, number, 0), (3, 3, number // 16 * 8)):
        actual, expected = (torch.empty(4096, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
        stochastic_copy_triton(actual, source, key, counter, first)
        stochastic_copy_eager(expected, source, key, counter, first)
        assert torch.equal(actual, expected), (key, counter, first)


def test_special_numbers_have_the_same_bits() -> None:
    """Copies of NaN, infinities, subnormals and the largest numbers are bitwise equal to the eager implementation."""
    bits = torch.randint(-(2**31), 2**31, (3000,)).to(torch.int32)
    bits[:8] = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7F800000, -(2**23), 1, 0x7F7FFFFF, 0x80FFFF]).to(torch.int32)
    source = bits.view(torch.float32).to(DEVICE)
    actual, expected = (torch.empty(3000, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    stochastic_copy_triton(actual, source, 3, 4)
    stochastic_copy_eager(expected, source, 3, 4)
    # NaN keeps its upper half on both sides.
    assert torch.equal(actual.view(torch.int16), expected.view(torch.int16))


def test_other_dtypes_are_refused() -> None:
    """A copy other than float32 to bfloat16 of one shape is an error that names dtypes and shapes."""
    source = torch.ones(8, device=DEVICE)
    for target in (torch.ones(8, dtype=torch.float16, device=DEVICE), torch.ones(9, device=DEVICE).bfloat16()):
        with pytest.raises(ValueError, match="copies float32 to bfloat16 of one shape, not"):
            stochastic_copy_triton(target, source, 0, 0)


def test_the_operator_passes_opcheck() -> None:
    """The operator passes torch.library.opcheck, which torch.compile relies on."""
    target, source = torch.ones(8, dtype=torch.bfloat16, device=DEVICE), torch.randn(8, device=DEVICE)
    torch.library.opcheck(torch.ops.drawloom.stochastic_copy.default, (target, source, 1, 2, 0))
