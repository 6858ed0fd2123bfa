"""Routing tables in Triton against the eager implementation."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from drawloom.kernels.moe.eager import moe_routes_eager
from drawloom.kernels.moe.triton import moe_routes_triton
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
def test_triton_equals_eager(
    _seed: object, tokens: int, choices: int, experts: int, dtype: torch.dtype, strided: bool
) -> None:
    """Any numbers of tokens, choices and experts, some choices dropped, give the same tables."""
    shape = (choices, tokens) if strided else (tokens, choices)
    expert_indices = torch.randint(-1, experts, shape, dtype=dtype, device=DEVICE)
    expert_indices = expert_indices.T if strided else expert_indices
    actual, expected = moe_routes_triton(expert_indices, experts), moe_routes_eager(expert_indices, experts)
    for result, reference in zip(actual, expected, strict=True):
        assert torch.equal(result, reference) and result.dtype == reference.dtype


def test_several_programs_keep_the_order() -> None:
    """More choices than a program processes, mostly for one expert, keep their order."""
    expert_indices = torch.where(torch.rand(500, 3) < 0.9, 77, torch.randint(-1, 512, (500, 3))).to(DEVICE)
    actual, expected = moe_routes_triton(expert_indices, 512), moe_routes_eager(expert_indices, 512)
    assert all(torch.equal(result, reference) for result, reference in zip(actual, expected, strict=True))


def test_the_operator_passes_opcheck() -> None:
    """The operator passes torch.library.opcheck, which torch.compile relies on."""
    torch.library.opcheck(torch.ops.drawloom.moe_routes.default, (torch.randint(-1, 4, (5, 2), device=DEVICE), 4))
