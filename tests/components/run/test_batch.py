"""TokenBatch sizes and data-parallel ranks' rows."""

import re
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any, Literal

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.ports.data import PackedDataset
from drawloom.components.ports.run import choose_micro_size
from drawloom.components.run.batch import GlobalBatch, RampStage
from drawloom.graph import UserError
from drawloom.graph.testing import fake

MeshOf = Callable[..., Any]
sizes = st.integers(1, 4)


def ranks(mesh_of: MeshOf, global_size: int, micro_size: int, replicate: int, shard: int) -> list[GlobalBatch]:
    """Return the batch node of every data-parallel rank, in order."""
    sizes = {"data_replicate": replicate, "data_shard": shard, "pipeline": 2}
    places = [(outer, inner) for outer in range(replicate) for inner in range(shard)]
    meshes = [mesh_of(sizes, {"data_replicate": outer, "data_shard": inner}) for outer, inner in places]
    return [GlobalBatch(mesh=mesh, global_size=global_size, micro_size=micro_size) for mesh in meshes]


def test_replicas_fit_if_all_get_equal_numbers_of_rows(mesh_of: MeshOf) -> None:
    """24 rows fit every divisor of 24, whatever the mesh and the microbatches are; a ramp must fit, too."""
    batch = ranks(mesh_of, 24, 2, 1, 2)[0]
    assert [count for count in range(1, 25) if batch.supports_replica_count(count)] == [1, 2, 3, 4, 6, 8, 12, 24]
    batch.ramp = [RampStage(size=8, until_step=2)]
    assert [count for count in range(1, 25) if batch.supports_replica_count(count)] == [1, 2, 4, 8]


@given(sizes, sizes, sizes, sizes, st.integers(1, 5))
def test_the_rows_of_a_step_do_not_depend_on_the_number_of_ranks(
    mesh_of: MeshOf, micro_size: int, microbatches: int, replicate: int, shard: int, step: int
) -> None:
    """Concatenated by rank, the microbatches are the step's positions, each once, in equal sizes."""
    global_size = micro_size * microbatches * replicate * shard
    all = ranks(mesh_of, global_size, micro_size, replicate, shard)
    taken = [batch.microbatch_row_positions(step) for batch in all]
    assert [batch.dp_rank for batch in all] == list(range(replicate * shard))
    assert all[0].dp_size == len(all)
    assert {len(micro) for places in taken for micro in places} == {micro_size}
    assert {len(places) for places in taken} == {microbatches}
    flat = [position for places in taken for micro in places for position in micro]
    assert flat == list(range((step - 1) * global_size, step * global_size))


RAMP = [RampStage(size=2, until_step=3), RampStage(size=4, until_tokens=100), RampStage(size=6, until_tokens=60)]
SIZES = [2, 2, 2, 4, 4, 8, 8]
"""Rows of 8 tokens: after three steps of two rows, 100 tokens take two steps of four, and 60 are reached before."""


def test_a_run_begins_with_steps_of_other_sizes(mesh_of: MeshOf) -> None:
    """Stages end at a step or after tokens; steps cover the positions without gaps, over any ranks, however dealt."""
    rows = fake(PackedDataset, length=8)
    deals: list[Literal["in_blocks", "in_turn"]] = ["in_blocks", "in_turn"]
    for deal, ranks in product(deals, (1, 2)):
        taken: list[list[int]] = [[] for _ in SIZES]
        for rank in range(ranks):
            mesh = mesh_of({"data_shard": ranks}, {"data_shard": rank})
            batch = GlobalBatch(mesh=mesh, rows=rows, global_size=8, micro_size=1, ramp=RAMP, deal=deal)
            batch.open()
            assert [batch.first_row_position(step) for step in range(1, 8)] == [sum(SIZES[:step]) for step in range(7)]
            for step, places in enumerate(taken, start=1):
                mine = [position for micro in batch.microbatch_row_positions(step) for position in micro]
                apart = {later - earlier for earlier, later in pairwise(mine)}
                assert apart <= {ranks if deal == "in_turn" else 1}
                places += mine
        assert [sorted(places) for places in taken] == [
            [*range(sum(SIZES[:step]), sum(SIZES[: step + 1]))] for step in range(7)
        ]


def test_pipeline_context_and_tensor_ranks_see_the_same_rows(mesh_of: MeshOf) -> None:
    """Ranks that differ only along these dimensions have the same positions."""
    layout = {"data_replicate": 2, "pipeline": 2, "context": 2, "tensor": 2}
    batches = [
        GlobalBatch(mesh=mesh_of(layout, {"data_replicate": 1, name: 1}), global_size=8, micro_size=2)
        for name in ("pipeline", "context", "tensor")
    ]
    assert [batch.microbatch_row_positions(1) for batch in batches] == [[[4, 5], [6, 7]]] * 3


@given(st.lists(st.integers(1, 12), min_size=1, max_size=3), st.integers(1, 12), st.integers(1, 4))
def test_microbatches_have_the_largest_equal_sizes_up_to_the_limit(
    shares: list[int], limit: int, replicas: int
) -> None:
    """No larger number up to the limit divides a replica's rows in all steps."""
    rows = choose_micro_size([share * replicas for share in shares], limit, replicas)
    assert rows == max(size for size in range(1, limit + 1) if not any(share % size for share in shares))


@given(st.integers(1, 60), st.integers(1, 6))
def test_every_number_in_the_remedy_works(global_size: int, replicas: int) -> None:
    """A size that is not divisible among the replicas is a fault, and every size in its remedy is divisible."""
    found = faults(global_size, 4, {"data_replicate": replicas, "data_shard": 1})
    assert bool(found) == bool(global_size % replicas)
    for _, _, hint in found:
        sizes = [int(number) for number in re.findall(r"\d+", hint)]
        assert sizes and not any(size % replicas for size in sizes)


def test_uneven_step_is_refused_when_the_mesh_is_known(mesh_of: MeshOf) -> None:
    """Opening raises with the size, the reason, and the nearest sizes that fit."""
    batch = ranks(mesh_of, 30, 4, 2, 2)[0]
    with pytest.raises(UserError) as error:
        batch.open()
    assert str(error.value) == (
        "global_size: 30 rows can't be divided evenly among 4 replicas; write global_size = 28 or 32"
    )
    ranks(mesh_of, 32, 4, 2, 2)[0].open()


@attrs.frozen
class Node:
    """A node as constraints see it."""

    settings: dict[str, Any]
    mesh: "Node | None" = None

    def neighbour(self, edge: str) -> "Node | None":
        return self.mesh if edge == "mesh" else None

    def problem(self, key: str, text: str, hint: str = "") -> tuple[str, str, str]:
        return key, text, hint


def faults(global_size: int, micro_size: int, mesh: dict[str, Any], *ramp: RampStage) -> list[Any]:
    node: Any = Node({"global_size": global_size, "micro_size": micro_size, "ramp": [*ramp]}, Node(mesh))
    return list(GlobalBatch.constraints(node))


def test_check_reports_sizes_without_a_matching_world_size() -> None:
    """Shards that do not divide a step are reported before the world size is known, and microbatches adapt."""
    assert faults(8, 4, {"data_replicate": "auto", "data_shard": 1}) == []
    assert faults(8, 2, {"data_replicate": "auto", "data_shard": 4}) == []
    assert faults(8, 3, {"data_replicate": "auto", "data_shard": 1}) == []
    [(key, text, hint)] = faults(8, 2, {"data_replicate": "auto", "data_shard": 3})
    assert key == ("global_size",)
    assert text == "8 rows can't be divided evenly among 3 replicas"
    assert hint == "write global_size = 6 or 9"


def test_check_reports_sizes_that_do_not_fit_the_written_mesh() -> None:
    """If the mesh sets data_replicate, `check` needs no world size."""
    assert faults(8, 2, {"data_replicate": 2, "data_shard": 2}) == []
    assert len(faults(8, 2, {"data_replicate": 3, "data_shard": 1})) == 1


def test_a_mesh_without_these_settings_is_not_checked() -> None:
    """A mesh component with other settings is not checked."""
    assert faults(8, 2, {}) == []


def test_check_reports_stages_without_one_end() -> None:
    """A stage ends at a step or after tokens; tokens need the length of rows; its size has to be even, too."""
    stages = (RampStage(size=2), RampStage(size=2, until_tokens=9), RampStage(size=3, until_step=2))
    found = faults(8, 2, {"data_shard": 2}, *stages)
    assert found == [
        (
            ("ramp", 2, "size"),
            "ramp[2]: 3 rows can't be divided evenly among 2 replicas",
            "write size = 2 or 4",
        ),
        (
            ("ramp", 0),
            "ramp[0] must set exactly one of until_step and until_tokens",
            "write until_step = N or until_tokens = N",
        ),
        (("ramp", 1), "ramp[1]: until_tokens needs the length of rows", 'write rows = "@packing"'),
    ]
