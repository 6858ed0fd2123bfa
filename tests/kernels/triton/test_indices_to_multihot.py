"""Multi-hot tables in Triton are those of the eager implementation."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from drawloom.kernels.moe import indices_to_multihot_eager
from drawloom.kernels.triton.indices_to_multihot import indices_to_multihot_triton
from support.kernels import DEVICE, assert_close, drawn, dtypes, exact, few, layouts
from support.seeding import seeds


@few
@given(seeds, st.integers(0, 60), st.integers(1, 6), st.integers(1, 70), dtypes, layouts)
def test_equals_eager(_seed: object, tokens: int, choices: int, experts: int, dtype: torch.dtype, layout: str) -> None:
    """Any numbers of tokens, choices and experts, with repeated and dropped choices, give the eager results."""
    expert_indices = torch.randint(-1, experts, (tokens, choices), device=DEVICE)
    probabilities = drawn(layout, tokens, choices, dtype=dtype)
    (wide,) = exact(probabilities)
    chosen, spread = indices_to_multihot_triton(expert_indices, probabilities, experts)
    expected = indices_to_multihot_eager(expert_indices, wide, experts)
    assert torch.equal(chosen, expected[0])
    assert_close(spread, expected[1])
    grad = drawn("contiguous", tokens, experts, dtype=dtype).detach()
    (ours,), (theirs,) = (
        torch.autograd.grad(spread, probabilities, grad),
        torch.autograd.grad(expected[1], wide, grad.double()),
    )
    assert_close(ours, theirs)


def test_passes_opcheck() -> None:
    """It passes torch.library.opcheck, which torch.compile relies on."""
    expert_indices, probabilities = torch.randint(-1, 4, (5, 2), device=DEVICE), torch.rand(5, 2, device=DEVICE)
    torch.library.opcheck(torch.ops.drawloom.indices_to_multihot.default, (expert_indices, probabilities, 4))
