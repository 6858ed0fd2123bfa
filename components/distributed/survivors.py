"""
Agreement on the ranks that continue after a loss.

All live ranks break their collectives, unwind, and meet in the launch's store. The first rank that sees every other one
as arrived or lost proposes the members, and all ranks use the proposal in the store, so that no two groups of survivors
exist. A rank leaves if its replica is incomplete, or is not needed.
"""

import json
import os
import time
from collections.abc import Callable, Sequence, Set
from typing import Any

import attrs

TICK = 0.02  # seconds between two looks into the store


@attrs.frozen
class Survivors:
    """Ranks, in the old numbering, that continue, and the store prefix for their meeting. Members are renumbered."""

    ranks: Sequence[int]
    meeting: str

    def set_rank_variables(self, rank: int) -> None:
        """Set the new RANK and WORLD_SIZE in the environment, as torchrun would; LOCAL_RANK keeps its device."""
        os.environ["RANK"] = str(self.ranks.index(rank))
        os.environ["WORLD_SIZE"] = str(len(self.ranks))


def choose_survivors(
    replicas: Sequence[Sequence[int]], lost_ranks: Set[int], is_valid_replica_count: Callable[[int], bool]
) -> list[int]:
    """
    Choose as many complete replicas as a valid count allows, and return their ranks, ascending; empty without any.

    A step's microbatches, for example, may not divide evenly among all complete replicas.
    """
    complete = [ranks for ranks in replicas if not lost_ranks & {*ranks}]
    count = next((count for count in range(len(complete), 0, -1) if is_valid_replica_count(count)), 0)
    return sorted(rank for ranks in complete[:count] for rank in ranks)


def agree_on_survivors(
    store: Any,
    rank: int,
    replicas: Sequence[Sequence[int]],
    is_valid_replica_count: Callable[[int], bool],
    get_lost_ranks: Callable[[], Set[int]],
    is_over: Callable[[], bool],
) -> list[int]:
    """
    Return the ranks that continue, equal on all live ranks; empty if no replica can, or if `is_over`.

    `is_valid_replica_count` returns whether a number of replicas can share the work. `get_lost_ranks` returns the ranks
    known to be lost, which may grow meanwhile. Raises RuntimeError if the store is gone.
    """
    store.set(f"joined/{rank}", b"1")
    everyone = [rank for ranks in replicas for rank in ranks]
    while any(other not in get_lost_ranks() and not store.check([f"joined/{other}"]) for other in everyone):
        if is_over():
            return []
        time.sleep(TICK)
    proposal = json.dumps(choose_survivors(replicas, get_lost_ranks(), is_valid_replica_count))
    members: list[int] = json.loads(store.compare_set("members", "", proposal))
    return members
