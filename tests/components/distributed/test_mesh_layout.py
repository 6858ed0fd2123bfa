"""The numbering of ranks in a mesh."""

import itertools
import math
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from drawloom.components.distributed.mesh_layout import Layout
from drawloom.components.distributed.mesh_sizes import resolve_layout
from drawloom.components.ports.distributed import DIMENSIONS, PerDimension
from drawloom.graph import UserError

ONES = dict.fromkeys(DIMENSIONS, 1)
SIZES = st.tuples(*[st.integers(1, 3)] * 5)


@hypothesis.given(SIZES)
def test_ranks_are_row_major(sizes: tuple[int, ...]) -> None:
    """The tensor index varies fastest with the rank, the pipeline index slowest."""
    layout = Layout(dict(zip(DIMENSIONS, sizes, strict=True)))
    for rank, indices in enumerate(itertools.product(*map(range, sizes))):
        assert tuple(layout.indices(rank).without_expert_dimensions().values()) == indices


@hypothesis.given(SIZES)
def test_a_set_differs_in_one_dimension_only(sizes: tuple[int, ...]) -> None:
    """Each dimension splits all ranks into disjoint sets, ordered along it, equal in every other dimension."""
    layout = Layout(dict(zip(DIMENSIONS, sizes, strict=True)))
    for name in DIMENSIONS:
        sets = layout.list_rank_sets(name)
        assert sorted(itertools.chain(*sets)) == list(range(math.prod(sizes)))
        for ranks in sets:
            assert [layout.indices(rank).without_expert_dimensions()[name] for rank in ranks] == list(
                range(layout.sizes[name])
            )
            others = {tuple((layout.indices(rank).without_expert_dimensions() | {name: 0}).values()) for rank in ranks}
            assert len(others) == 1


def test_expert_groups_are_consecutive_ranks_of_a_stage() -> None:
    """Expert parallelism splits a stage's ranks into runs of consecutive ranks."""
    layout = resolve_layout({**ONES, "pipeline": 2, "data_shard": 2, "tensor": 2, "data_replicate": "auto"}, 2, 16)
    assert layout.list_rank_sets("expert")[:3] == [[0, 1], [2, 3], [4, 5]]
    assert layout.list_rank_sets("expert_shard")[:3] == [[0, 2], [1, 3], [4, 6]]
    assert layout.list_rank_sets("expert_replicate", "expert_shard")[:2] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert layout.list_rank_sets("data_replicate")[:2] == [[0, 4], [1, 5]]
    assert layout.sizes_with_experts == PerDimension(
        pipeline=2, data_replicate=2, data_shard=2, tensor=2, expert_replicate=2, expert_shard=2, expert=2
    )
    assert (layout.indices(6).expert, layout.indices(6).expert_shard, layout.indices(6).data_replicate) == (0, 1, 1)


def test_auto_shards_take_the_remaining_ranks() -> None:
    """They leave no ranks for `auto` replicas, and the rest beside a number of replicas."""
    sizes: dict[str, int | str] = {**ONES, "data_shard": "auto", "tensor": 2}
    for replicas, expected in (("auto", (1, 6)), (3, (3, 2))):
        layout = resolve_layout({**sizes, "data_replicate": replicas}, 1, 12)
        assert (layout.sizes["data_replicate"], layout.sizes["data_shard"]) == expected


@pytest.mark.parametrize(("world_size", "rest"), [(1, None), (2, None), (6, 1), (12, 2), (9, None)])
def test_auto_takes_the_remaining_ranks(world_size: int, rest: int | None) -> None:
    """`auto` is the world size over the product of the others; a remainder is an error."""
    sizes: dict[str, int | str] = {**ONES, "data_replicate": "auto", "tensor": 2, "context": 3}
    if rest is not None:
        assert resolve_layout(sizes, 1, world_size).sizes_with_experts.data_replicate == rest
        return
    with pytest.raises(UserError, match=r"= 6 processes.*drawloom launch --nproc-per-node 6 run RECIPE"):
        resolve_layout(sizes, 1, world_size)


def test_a_wrong_product_names_the_command() -> None:
    """The message has the product, the number of processes, and the command to run."""
    with pytest.raises(UserError) as caught:
        resolve_layout({**ONES, "pipeline": 2, "data_replicate": 3}, 1, 2)
    assert str(caught.value) == (
        "the mesh pipeline 2 × data_replicate 3 × data_shard 1 × context 1 × tensor 1 = 6 needs 6 processes, and "
        "there are 2; start it with `drawloom launch --nproc-per-node 6 run RECIPE`"
    )
    assert caught.value.exit_code == 2


@hypothesis.given(SIZES, st.data())
def test_ranks_of_one_copy_of_the_model_hold_each_parameter_together(sizes: tuple[int, ...], data: Any) -> None:
    """Ranks along `expert_replicate` have equal indices along all dimensions that split parameters."""
    whole = Layout(dict(zip(DIMENSIONS, sizes, strict=True)))
    stage = math.prod(sizes[1:])
    expert = data.draw(st.sampled_from([number for number in range(1, stage + 1) if stage % number == 0]))
    layout = Layout(whole.sizes, expert)
    assert math.prod(layout.expert_sizes.values()) == layout.world_size
    split = ("pipeline", "data_shard", "context", "tensor", "expert", "expert_shard")
    copies = layout.list_rank_sets("expert_replicate")
    for ranks in copies:
        assert len({tuple(getattr(layout.indices(rank), name) for name in split) for rank in ranks}) == 1
    fits = [number for number in range(1, sizes[1] + 1) if number * math.prod(sizes[2:]) % expert == 0]
    assert len(copies[0]) == sizes[1] // fits[0]


def test_experts_must_divide_the_ranks_of_a_stage() -> None:
    """expert = 4 does not divide the six ranks of a stage, though it divides all 12; the message lists divisors."""
    sizes: dict[str, int | str] = {**ONES, "pipeline": 2, "data_shard": 3, "data_replicate": "auto"}
    with pytest.raises(UserError, match=r"expert = 4 does not divide .* = 6; write one of 1, 2, 3, 6"):
        resolve_layout(sizes, 4, 12)
