"""
Generations: agreement on the processes that continue after a loss, and on new ones that join.

After a loss, all live ranks break their collectives, unwind, and meet in the launch's store. The first rank that sees
every other one as arrived or lost proposes the next generation's members, and all ranks use the proposal in the store,
so that no two groups exist. Processes that start later, and ranks in incomplete replicas, are spares: they wait in the
store, and form new replicas as soon as they are enough. Without a complete replica, all live ranks and spares form one
with as many shards as they are enough for. If all ranks are lost, the spares propose the next generation.
"""

import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import attrs
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from drawloom.components.distributed.torchrun import get_boot_and_namespace_id

TICK = 0.02  # seconds between two looks into the store
CURRENT = "current_generation"
"""Key in the launch's store: the newest generation of the launch's run."""


@attrs.frozen
class RunProcess:
    """A process: its machine (`torchrun.get_boot_and_namespace_id`), and its id there."""

    machine: str
    pid: int

    @classmethod
    def of_this_process(cls) -> "RunProcess":
        """Return this process."""
        return cls(get_boot_and_namespace_id() if hasattr(os, "pidfd_open") else "", os.getpid())

    def has_ended_on_this_machine(self) -> bool:
        """Return whether the process has ended; False if it is on another machine."""
        return self.machine == RunProcess.of_this_process().machine and not Path(f"/proc/{self.pid}").exists()


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

    def to_json(self) -> str:
        """Return the generation as JSON."""
        return json.dumps(attrs.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Generation":
        """Return the generation in a JSON text."""
        values = json.loads(text)
        shape = values.pop("shape")
        members = [RunProcess(**member) for member in values.pop("members")]
        return cls(**values, members=members, shape=shape and ReplicaShape(**shape))

    def set_rank_environment(self, rank: int) -> None:
        """Set RANK and WORLD_SIZE in the environment, as torchrun would; LOCAL_RANK keeps its device."""
        os.environ["RANK"] = str(rank)
        os.environ["WORLD_SIZE"] = str(len(self.members))

    def describe_membership_change_to(self, following: "Generation") -> str:
        """Return a message with the numbers of staying and of joining members."""
        new = [member for member in following.members if member not in self.members]
        staying = f"{len(following.members) - len(new)} of {len(self.members)} processes continue"
        joining = f"{len(new)} process{'es join' if len(new) > 1 else ' joins'}"
        return f"{staying}; {joining}" if new else staying

    def choose_next_generation(self, lost: Set[int], spares: Iterable[RunProcess]) -> "Generation":
        """
        Return the next generation: as many replicas as possible that can share the work.

        Complete replicas come first; live ranks in incomplete ones and `spares` form new replicas. Without a complete
        replica of the recipe's shape, the processes form replicas with as many shards as possible. No members if they
        are too few.
        """
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


@attrs.define
class Spares:
    """
    A run's spares in the launch's store, with numbers from 1.

    Known spares are read once, because rank 0 asks for spares in every step.
    """

    store: Any
    _known: dict[int, RunProcess] = attrs.field(init=False, factory=dict)
    _settled: set[int] = attrs.field(init=False, factory=set)  # admitted, or ended

    def register(self, member: RunProcess) -> int:
        """Add a spare, and return its number."""
        number: int = self.store.add("spares", 1)
        self.store.set(f"spare/{number}", json.dumps(attrs.asdict(member)))
        return number

    def find_waiting_spares(self) -> dict[int, RunProcess]:
        """Return the live spares that were not admitted yet, by number."""
        last: int = self.store.add("spares", 0)
        for number in {*range(1, last + 1)} - self._settled:
            if number not in self._known and self.store.check([f"spare/{number}"]):
                self._known[number] = RunProcess(**json.loads(self.store.get(f"spare/{number}")))
            if number in self._known and (
                self._known[number].has_ended_on_this_machine() or self.store.check([f"admitted/{number}"])
            ):
                self._settled.add(number)
        return {number: self._known[number] for number in sorted(self._known.keys() - self._settled)}

    def find_admission(self, number: int) -> Generation | None:
        """Return the generation that has admitted a spare; None until then."""
        if not self.store.check([f"admitted/{number}"]):
            return None
        return Generation.from_json(self.store.get(f"admitted/{number}").decode())

    def announce_admission(self, numbers: Iterable[int], generation: Generation) -> None:
        """Tell spares that they are members in this generation; a second call changes nothing."""
        for number in numbers:
            self.store.set(f"admitted/{number}", generation.to_json())

    def announce_run_end(self, exit_code: int) -> None:
        """Tell all spares that the run has ended with this exit code."""
        self.store.set("ended", str(exit_code))

    def find_exit_code(self) -> int | None:
        """Return the run's exit code; None if it has not ended."""
        return int(self.store.get("ended")) if self.store.check(["ended"]) else None


def agree_on_next_generation(
    generation: Generation,
    rank: int,
    store: Any,
    spares: Spares,
    losses: Callable[[], Mapping[int, str]],
    is_over: Callable[[], bool],
) -> Generation | None:
    """
    Return the next generation, equal on all live ranks; None if too few are left for a replica, or if `is_over`.

    `store` is this generation's. `losses` returns the lost ranks, which may grow meanwhile. Raises RuntimeError if the
    store is gone.
    """
    store.set(f"joined/{rank}", b"1")
    everyone = range(len(generation.members))
    while any(other not in losses() and not store.check([f"joined/{other}"]) for other in everyone):
        if is_over():
            return None
        time.sleep(TICK)
    chosen = propose_next_generation(generation, losses().keys(), store, spares)
    return chosen if chosen.members else None


def propose_next_generation(generation: Generation, lost: Set[int], store: Any, spares: Spares) -> Generation:
    """Propose a next generation in this generation's store, unless there is one; return it and tell its spares."""
    following = generation.choose_next_generation(lost, spares.find_waiting_spares().values())
    chosen = Generation.from_json(store.compare_set("following", "", following.to_json()).decode())
    # every process does this, because the one that has proposed may be lost meanwhile
    spares.announce_admission(
        [number for number, spare in spares.find_waiting_spares().items() if spare in chosen.members], chosen
    )
    return chosen
