"""Routes in Triton are those of the eager twin."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from drawloom.kernels.moe import moe_routes_eager
from drawloom.kernels.triton.moe_routes import moe_routes_triton
from support.kernels import DEVICE, few
from support.seeding import seeds


@few
@given(
    seeds,
    st.integers(0, 60),
    st.integers(1, 9),
    st.integers(1, 70),
    st.sampled_from([torch.int32, torch.int64]),
    st.booleans(),
)
def test_equals_eager(
    _seed: object, tokens: int, choices: int, experts: int, dtype: torch.dtype, strided: bool
) -> None:
    """Any numbers of tokens, choices and experts, some of nobody, give the same tables."""
    shape = (choices, tokens) if strided else (tokens, choices)
    experts_of = torch.randint(-1, experts, shape, dtype=dtype, device=DEVICE)
    experts_of = experts_of.T if strided else experts_of
    found, expected = moe_routes_triton(experts_of, experts), moe_routes_eager(experts_of, experts)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype


def test_several_programs() -> None:
    """More choices than a program has, most of one expert and none of others, keep their order."""
    experts_of = torch.where(torch.rand(500, 3) < 0.9, 77, torch.randint(-1, 512, (500, 3))).to(DEVICE)
    found, expected = moe_routes_triton(experts_of, 512), moe_routes_eager(experts_of, 512)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_is_an_operation_of_torch() -> None:
    """It keeps the promises that torch.compile relies on."""
    torch.library.opcheck(torch.ops.drawloom.moe_routes.default, (torch.randint(-1, 4, (5, 2), device=DEVICE), 4))
