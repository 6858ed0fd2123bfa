"""Batch sizes and the rows of each data-parallel rank."""

import re
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.run.batch import GlobalBatch, uneven
from drawloom.graph import UserError

MeshOf = Callable[..., Any]
sizes = st.integers(1, 4)


def ranks(mesh_of: MeshOf, global_size: int, micro_size: int, replicate: int, shard: int) -> list[GlobalBatch]:
    """The batch node of every data-parallel rank, in order."""
    sizes = {"data_replicate": replicate, "data_shard": shard, "pipeline": 2}
    places = [(outer, inner) for outer in range(replicate) for inner in range(shard)]
    meshes = [mesh_of(sizes, {"data_replicate": outer, "data_shard": inner}) for outer, inner in places]
    return [GlobalBatch(mesh=mesh, global_size=global_size, micro_size=micro_size) for mesh in meshes]


@given(sizes, sizes, sizes, sizes, st.integers(1, 5))
def test_the_rows_of_a_step_do_not_depend_on_the_number_of_ranks(
    mesh_of: MeshOf, micro_size: int, microbatches: int, replicate: int, shard: int, step: int
) -> None:
    """Concatenated by rank, the microbatches are the step's positions, each once, in equal sizes."""
    global_size = micro_size * microbatches * replicate * shard
    all = ranks(mesh_of, global_size, micro_size, replicate, shard)
    taken = [batch.positions(step) for batch in all]
    assert [batch.dp_rank for batch in all] == list(range(replicate * shard))
    assert all[0].dp_size == len(all)
    assert {len(micro) for places in taken for micro in places} == {micro_size}
    assert {len(places) for places in taken} == {microbatches} == {batch.microbatches for batch in all}
    flat = [place for places in taken for micro in places for place in micro]
    assert flat == list(range((step - 1) * global_size, step * global_size))


def test_pipeline_context_and_tensor_ranks_see_the_same_rows(mesh_of: MeshOf) -> None:
    """Ranks that differ only along these dimensions have the same positions."""
    layout = {"data_replicate": 2, "pipeline": 2, "context": 2, "tensor": 2}
    batches = [
        GlobalBatch(mesh=mesh_of(layout, {"data_replicate": 1, name: 1}), global_size=8, micro_size=2)
        for name in ("pipeline", "context", "tensor")
    ]
    assert [batch.positions(1) for batch in batches] == [[[4, 5], [6, 7]]] * 3


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 6))
def test_every_number_in_the_remedy_works(global_size: int, micro_size: int, replicas: int) -> None:
    """Every size that the error message suggests is accepted."""
    fault = uneven(global_size, micro_size, replicas)
    if fault is None:
        assert global_size % (micro_size * replicas) == 0
        return
    remedy, _, other = fault[1].partition(", or micro_size = ")
    for number in re.findall(r"\d+", remedy):
        assert uneven(int(number), micro_size, replicas) is None
    assert re.findall(r"\d+", remedy)
    assert not other or uneven(global_size, int(other), replicas) is None


def test_uneven_step_is_refused_when_the_mesh_is_known(mesh_of: MeshOf) -> None:
    """Opening raises with the size, the reason, and the nearest sizes that fit."""
    batch = ranks(mesh_of, 30, 4, 2, 2)[0]
    with pytest.raises(UserError) as error:
        batch.open()
    assert str(error.value) == (
        "global_size: 30 rows can't be divided evenly among 4 replicas with microbatches of 4; "
        "write global_size = 16 or 32"
    )
    ranks(mesh_of, 32, 4, 2, 2)[0].open()


@attrs.frozen
class Node:
    """A node as constraints see it."""

    settings: dict[str, Any]
    meshes: list["Node"] = attrs.field(factory=list)

    def neighbours(self, edge: str) -> list["Node"]:
        return self.meshes if edge == "mesh" else []

    def problem(self, key: str, text: str, hint: str = "") -> tuple[str, str, str]:
        return key, text, hint


def faults(global_size: int, micro_size: int, mesh: dict[str, Any]) -> list[Any]:
    node: Any = Node({"global_size": global_size, "micro_size": micro_size}, [Node(mesh)])
    return list(GlobalBatch.constraints(node))


def test_check_reports_sizes_that_fit_no_world_size() -> None:
    """Microbatches and shards that do not divide a step are reported before the world size is known."""
    assert faults(8, 4, {"data_replicate": "auto", "data_shard": 1}) == []
    assert faults(8, 2, {"data_replicate": "auto", "data_shard": 4}) == []
    [(key, text, hint)] = faults(8, 3, {"data_replicate": "auto", "data_shard": 1})
    assert key == "global_size"
    assert text == "8 rows can't be divided evenly among 1 replica with microbatches of 3"
    assert hint == "write global_size = 6 or 9, or micro_size = 2"
    assert len(faults(8, 2, {"data_replicate": "auto", "data_shard": 3})) == 1


def test_check_reports_sizes_that_do_not_fit_the_written_mesh() -> None:
    """If the mesh sets data_replicate, `check` needs no world size."""
    assert faults(8, 2, {"data_replicate": 2, "data_shard": 2}) == []
    assert len(faults(8, 2, {"data_replicate": 3, "data_shard": 1})) == 1


def test_a_mesh_without_these_settings_is_no_problem() -> None:
    """A mesh component with other settings is not checked."""
    assert faults(8, 2, {}) == []
