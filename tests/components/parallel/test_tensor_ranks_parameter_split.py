"""Parameters replaced by a rank's slice."""

import pytest
import torch
from torch import nn

from drawloom.components.model.layers import VOCABULARY
from drawloom.components.parallel.tensor_ranks import SplitDim, replace_by_rank_slice
from drawloom.graph import UserError
from support.doubles import SilentRank


def test_a_slice_keeps_dtype_and_requires_grad() -> None:
    """A frozen bfloat16 parameter becomes a frozen one with the rank's size along the dimension."""
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(6, 4, dtype=torch.bfloat16).requires_grad_(False))
    split = replace_by_rank_slice(module, "0.weight", SilentRank(1, 3), "expert", SplitDim(1))
    local = module.get_parameter("0.weight")
    assert (tuple(local.shape), local.dtype, local.requires_grad, local.is_meta) == (
        (4, 2),
        torch.bfloat16,
        False,
        True,
    )
    assert (split.tensor_slice.shape, split.tensor_slice.offsets, split.dim) == ((4, 6), (0, 2), 1)


def test_ranks_that_do_not_divide_are_named() -> None:
    """The message has the dimension of the mesh, the ranks, the size and the parameter."""
    with pytest.raises(
        UserError, match=r"mesh.expert = 4 ranks can't partition dimension 0 of size 6 of weight evenly"
    ):
        replace_by_rank_slice(nn.Linear(2, 6, device="meta"), "weight", SilentRank(0, 4), "expert", SplitDim(0))


def test_uneven_slices_tile_the_whole_and_differ_by_one() -> None:
    """Slices follow one another without a gap, none is empty, and lengths differ by one row at most."""
    for length, ranks in ((7, 2), (50257, 4), (8, 4), (5, 5), (11, 8)):
        places = [
            replace_by_rank_slice(
                nn.Linear(2, length, device="meta"), "weight", SilentRank(rank, ranks), "tensor", VOCABULARY
            ).tensor_slice
            for rank in range(ranks)
        ]
        ends = [tensor_slice.offsets[0] + tensor_slice.size[0] for tensor_slice in places]
        assert [tensor_slice.offsets for tensor_slice in places] == [(start, 0) for start in [0, *ends[:-1]]]
        sizes = {tensor_slice.size[0] for tensor_slice in places}
        assert ends[-1] == length and min(sizes) > 0 and max(sizes) - min(sizes) <= 1
