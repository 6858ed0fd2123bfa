"""What the processes of a run promise one another."""

from drawloom.components.ports.distributed import Processes
from drawloom.graph.testing import expect


def ranks_are_counted(processes: Processes) -> None:
    """Ranks go from 0, over all and on this machine."""
    expect(0 <= processes.rank < processes.world_size, f"rank {processes.rank} is none of {processes.world_size}")
    local = processes.local_rank, processes.local_world_size
    expect(0 <= local[0] < local[1] <= processes.world_size, f"rank {local[0]} is none of {local[1]} on this machine")


def a_group_is_the_set_with_this_rank(processes: Processes) -> None:
    """Of several sets of ranks, the group is the one that this rank is in, and it knows its place there."""
    world = list(range(processes.world_size))
    together = processes.group("together", [world])
    expect((together.rank, together.size) == (processes.rank, len(world)), "the group of all is another")
    alone = processes.group("alone", [[rank] for rank in world])
    expect((alone.rank, alone.size) == (0, 1), "a group of one is another")
    expect(alone.gather_json({"a": [1, None]}) == [{"a": [1, None]}], "a group of one gathers something else")
