"""Meshes whose ranks do not run."""

import pytest
import torch

from drawloom.components.distributed.planned import PlannedDevice, PlannedMesh
from drawloom.graph import UserError


def test_planned_groups_equal_the_layout() -> None:
    """Groups equal the layout's for a pipeline stage's first rank; a dimension with size "auto" takes the rest."""
    mesh = PlannedMesh.from_settings({"pipeline": 2, "data_replicate": "auto", "tensor": 2}, 8)
    assert [*mesh.sizes.without_expert_dimensions().values()] == [2, 2, 1, 1, 2]
    assert mesh.world.size == 8
    second = mesh.seen_from_pipeline_rank(1)
    assert (second.rank, second.indices.pipeline, second.group("tensor").ranks) == (4, 1, (4, 5))
    assert second.replica_group.size == 2
    assert second.create_torch_mesh("tensor") is None


def test_a_mesh_that_does_not_fit_raises_an_error() -> None:
    """The error equals a run's with as many processes."""
    with pytest.raises(UserError, match="needs 3 processes"):
        PlannedMesh.from_settings({"tensor": 3}, 4)


def test_collectives_give_tensors_of_the_right_shape() -> None:
    """On the meta device, where they have no values."""
    group = PlannedMesh.from_settings({"tensor": 4}, 4).group("tensor")
    part = torch.empty(2, 3, device="meta")
    assert group.gather(part).shape == (4, 2, 3)
    assert group.reduce_scatter(group.gather(part)).shape == (2, 3)
    assert group.all_to_all(part, [1, 1], [2, 3]).shape == (5, 3)
    group.sum(part)
    group.max(part)
    assert group.start_sum(part).is_completed()
    assert group.gather_json("x") == ["x"] * 4
    assert PlannedDevice(torch.device("cuda")).get_peak_memory_so_far() == 0
