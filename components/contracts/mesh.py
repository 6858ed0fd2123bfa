"""What every mesh does."""

from math import prod

from drawloom.components.ports.distributed import Mesh
from drawloom.graph.testing import expect

DIMENSIONS = ("pipeline", "data_replicate", "data_shard", "context", "tensor")


def sizes_multiply_to_the_world(mesh: Mesh) -> None:
    """Every rank has one place along every dimension."""
    sizes = {name: mesh.size(name) for name in DIMENSIONS}
    expect(prod(sizes.values()) == mesh.world.size, f"{sizes} are not {mesh.world.size} ranks")
    for name in (*DIMENSIONS, "expert"):
        expect(0 <= mesh.index(name) < mesh.size(name), f"this rank lies at {mesh.index(name)} along {name}")


def groups_lie_along_dimensions(mesh: Mesh) -> None:
    """The group of a dimension has as many ranks as it is long, and this rank lies in it where it lies there."""
    for name in DIMENSIONS:
        group = mesh.group(name)
        expect((group.rank, group.size) == (mesh.index(name), mesh.size(name)), f"the group of {name} is another")
