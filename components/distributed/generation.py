"""
A run's processes by rank between two changes (a generation), and the next generation after a loss.

Complete replicas continue, and spares form new ones as soon as they are enough. Without a complete replica, all live
ranks and spares form one with as many shards as they are enough for. If the launcher starts hot spares, a spare has no
LOCAL_RANK, and so no GPU, before a generation admits it with one that no live process on its machine has.
"""

import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path
from typing import Any

import attrs
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from drawloom.components.distributed.torchrun import Launch, get_boot_and_namespace_id


@attrs.frozen
class RunProcess:
    """
    A process: its machine (`torchrun.get_boot_and_namespace_id`), and its id there.

    `local_rank` is its LOCAL_RANK, below its machine's `local_world_size`, or None until it joins. Without hot spares
    both are unset, because a process keeps its LOCAL_RANK.
    """

    machine: str
    pid: int
    local_rank: int | None = attrs.field(default=None, eq=False)
    local_world_size: int = attrs.field(default=0, eq=False)

    @classmethod
    def of_this_process(cls) -> "RunProcess":
        """Return this process."""
        return cls(get_boot_and_namespace_id() if hasattr(os, "pidfd_open") else "", os.getpid())

    @classmethod
    def from_launch(cls, launch: Launch, *, is_member: bool) -> "RunProcess":
        """Return this process, with its LOCAL_RANK if it is or was a member."""
        if not launch.spares:
            return cls.of_this_process()
        local_rank = launch.local_rank if is_member else None
        return attrs.evolve(cls.of_this_process(), local_rank=local_rank, local_world_size=launch.local_world_size)

    def has_ended_on_this_machine(self) -> bool:
        """Return whether the process has ended; False if it is on another machine."""
        return self.machine == RunProcess.of_this_process().machine and not Path(f"/proc/{self.pid}").exists()


def assign_local_ranks(live: Iterable[RunProcess], spares: Iterable[RunProcess]) -> list[RunProcess]:
    """Return the spares that can join, each with a LOCAL_RANK that no live process on its machine has."""
    used = {(process.machine, process.local_rank) for process in live}
    assigned = []
    for spare in sorted(spares, key=lambda spare: spare.local_rank is None):  # former members keep their GPUs
        own = [] if spare.local_rank is None else [spare.local_rank]
        free = [rank for rank in (*own, *range(spare.local_world_size)) if (spare.machine, rank) not in used]
        if free or not spare.local_world_size:
            assigned.append(attrs.evolve(spare, local_rank=next(iter(free), None)))
            used.add((spare.machine, assigned[-1].local_rank))
    return assigned


@attrs.frozen
class ReplicaShape:
    """
    A replica's ranks: pipeline stages × shards × ranks in a shard (context × tensor).

    Only numbers of data-parallel ranks (replicas × shards) in `counts` can share the work. If experts are partitioned
    over `expert` ranks, and so over several of the mesh's replicas, these count as one: none of them has all experts.
    """

    stages: int
    shards: int
    shard_size: int
    counts: Sequence[int]
    expert: int = 1

    @classmethod
    def with_fitting_counts(
        cls, world_size: int, shape: tuple[int, int, int, int], fits: Callable[[int], bool]
    ) -> "ReplicaShape":
        """Return the shape for `Processes.set_replica_shape`, with the fitting numbers of ranks."""
        stages, shards, shard_size, expert = shape
        largest = world_size // (stages * shard_size)
        counts = [count for count in range(1, largest + 1) if count == largest or fits(count)]
        return cls(stages, shards, shard_size, counts, expert)

    @property
    def size(self) -> int:
        """Ranks in a replica."""
        return self.stages * self.data_ranks * self.shard_size

    @property
    def data_ranks(self) -> int:
        """Data-parallel ranks in a replica: the fewest with a whole number of replicas and of sets of experts."""
        return math.lcm(self.shards * self.shard_size, self.expert) // self.shard_size

    def list_ranks_by_replica(self, count: int) -> list[list[int]]:
        """Return each replica's ranks among `count` replicas, in the mesh's numbering, where the stage comes first."""
        width = self.data_ranks * self.shard_size
        return [
            [(stage * count + replica) * width + number for stage in range(self.stages) for number in range(width)]
            for replica in range(count)
        ]

    def find_max_replica_count(self, processes: int) -> int:
        """Return the largest number of replicas that can share the work, with at most so many processes; 0 if none."""
        largest = processes // self.size
        return max((count for count in range(1, largest + 1) if count * self.data_ranks in self.counts), default=0)

    def shrink(self, processes: int) -> "ReplicaShape | None":
        """Return the shape of one replica with the most shards for `processes` ranks; None if they are too few."""
        shapes = (attrs.evolve(self, shards=shards) for shards in range(self.shards, 0, -1))
        return next((shape for shape in shapes if shape.find_max_replica_count(processes)), None)


@attrs.frozen
class Generation:
    """
    A run's processes by rank, between two changes; `run` is the run's unique name in the store.

    `shape` is the replicas' shape in the recipe, and `shards` the number of shards that they have (None: as many).
    """

    run: str
    number: int
    members: Sequence[RunProcess]
    shape: ReplicaShape | None = None
    shards: int | None = None

    @property
    def name(self) -> str:
        """This generation's prefix in the store."""
        return f"{self.run}/{self.number}"

    def get_store(self, launch_store: Any) -> Any:
        """Return this generation's keys in the launch's store."""
        return PrefixStore(f"drawloom/{self.name}", launch_store.underlying_store)

    def find_local_pids(self) -> dict[int, int]:
        """Return the members' process ids on this machine, by rank."""
        machine = RunProcess.of_this_process().machine
        return {rank: member.pid for rank, member in enumerate(self.members) if member.machine == machine}

    def to_json(self) -> str:
        """Return the generation as JSON."""
        return json.dumps(attrs.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Generation":
        """Return the generation in a JSON text, which the store returns as bytes."""
        values = json.loads(text)
        shape = values.pop("shape")
        members = [RunProcess(**member) for member in values.pop("members")]
        return cls(**values, members=members, shape=shape and ReplicaShape(**shape))

    def set_rank_environment(self, rank: int) -> None:
        """Set RANK, WORLD_SIZE and an assigned LOCAL_RANK in the environment, as torchrun would."""
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(len(self.members))}
        if (local_rank := self.members[rank].local_rank) is not None:
            os.environ["LOCAL_RANK"] = str(local_rank)

    def describe_membership_change_to(self, following: "Generation") -> str:
        """Return a message with how many members stay and join."""
        new = [member for member in following.members if member not in self.members]
        staying = f"{len(following.members) - len(new)} of {len(self.members)} processes continue"
        joining = f"{len(new)} process{'es join' if len(new) > 1 else ' joins'}"
        return f"{staying}; {joining}" if new else staying

    def choose_next_generation(self, lost: Set[int], spares: Iterable[RunProcess]) -> "Generation":
        """
        Return the next generation: as many replicas as possible that can share the work.

        Complete replicas come first; live ranks in incomplete ones and `spares` form new replicas. Without a complete
        replica of the recipe's shape, the processes form replicas with as many shards as possible. No members if they
        are too few. Spares without a free LOCAL_RANK on their machine are left out.
        """
        spares = assign_local_ranks([member for rank, member in enumerate(self.members) if rank not in lost], spares)
        following = attrs.evolve(self, number=self.number + 1, members=[], shards=None)
        if self.shape is None:
            return following
        shape = attrs.evolve(self.shape, shards=self.shards or self.shape.shards)
        complete: list[list[RunProcess]] = []
        pool: list[RunProcess] = []
        for ranks in shape.list_ranks_by_replica(len(self.members) // shape.size):
            live = [self.members[rank] for rank in ranks if rank not in lost]
            if len(live) == shape.size:
                complete.append(live)
            else:
                pool += live
        pool += spares
        if shape != self.shape or not complete:
            pool, complete = [*itertools.chain.from_iterable(complete), *pool], []
            if (shrunk := self.shape.shrink(len(pool))) is None:
                return following
            shape = shrunk
        replicas = [*complete, *(pool[start : start + shape.size] for start in range(0, len(pool), shape.size))]
        count = shape.find_max_replica_count(sum(map(len, replicas)))
        placed = {
            rank: member
            for ranks, replica in zip(shape.list_ranks_by_replica(count), replicas, strict=False)
            for rank, member in zip(ranks, replica, strict=True)
        }
        members = [placed[rank] for rank in range(count * shape.size)]
        shards = None if shape.shards == self.shape.shards else shape.shards
        return attrs.evolve(following, members=members, shards=shards if members else None)
