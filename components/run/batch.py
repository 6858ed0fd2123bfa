"""Global and micro batch size, and which rows each data-parallel rank sees: all arithmetic with batch sizes."""

from collections.abc import Iterator
from math import prod

from drawloom.components.ports.distributed import Mesh
from drawloom.graph import UserError, at_least, component, setting
from drawloom.graph.build.node import NodeView
from drawloom.graph.problems import Problem


@component
class GlobalBatch:
    """
    A fixed number of rows in each step, divided evenly among data-parallel ranks and then into microbatches.

    A step takes the next `global_size` positions of the endless order, and each data-parallel rank a contiguous block
    of them: the rows of a step do not depend on the number of ranks.
    """

    mesh: Mesh
    global_size: int = setting(check=at_least(1), doc="rows in a step, over all data-parallel ranks")
    micro_size: int = setting(check=at_least(1), impact="safe", doc="rows in a microbatch")

    def open(self) -> None:
        """Check the sizes against the mesh; a UserError if the rows of a step can't be divided evenly."""
        if fault := uneven(self.global_size, self.micro_size, self.dp_size):
            raise UserError(f"global_size: {fault[0]}; {fault[1]}", exit_code=2)

    @property
    def dp_size(self) -> int:
        """Data-parallel size: the number of parts into which the rows of a step are divided."""
        # pipeline, context and tensor ranks work on the same rows
        return self.mesh.size("data_replicate") * self.mesh.size("data_shard")

    @property
    def dp_rank(self) -> int:
        """Data-parallel rank: the index of this rank's part."""
        return self.mesh.index("data_replicate") * self.mesh.size("data_shard") + self.mesh.index("data_shard")

    @property
    def microbatches(self) -> int:
        """Microbatches in a step on each data-parallel rank."""
        return self.global_size // (self.micro_size * self.dp_size)

    def positions(self, step: int) -> list[list[int]]:
        """This rank's microbatches of a step (from 1), each as positions in the endless order of rows."""
        share = self.microbatches * self.micro_size
        first = (step - 1) * self.global_size + self.dp_rank * share
        return [list(range(start, start + self.micro_size)) for start in range(first, first + share, self.micro_size)]

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Sizes that are uneven for any number of processes."""
        # a dimension of size "auto" counts as 1: the least that it can be, which divides every other
        for mesh in node.neighbours("mesh"):
            sizes = [mesh.settings.get(name) for name in ("data_replicate", "data_shard")]
            replicas = prod(size for size in sizes if isinstance(size, int))
            if fault := uneven(node.settings["global_size"], node.settings["micro_size"], replicas):
                yield node.problem("global_size", *fault)


def uneven(global_size: int, micro_size: int, replicas: int) -> tuple[str, str] | None:
    """Why a step can't be divided into whole microbatches, and what to write instead; None if it can."""
    unit = micro_size * replicas
    if global_size % unit == 0:
        return None
    among = f"{replicas} replica{'s' * (replicas > 1)} with microbatches of {micro_size}"
    return f"{global_size} rows can't be divided evenly among {among}", _remedy(global_size, micro_size, replicas)


def _remedy(global_size: int, micro_size: int, replicas: int) -> str:
    unit = micro_size * replicas
    below = global_size // unit * unit
    nearest = [below, below + unit] if below else [unit]
    remedy = "write global_size = " + " or ".join(map(str, nearest))
    if global_size % replicas == 0:
        share = global_size // replicas
        fitting = max(size for size in range(1, min(micro_size, share) + 1) if share % size == 0)
        remedy += f", or micro_size = {fitting}"
    return remedy
