"""Whether ranks that must see the same rows do."""

import json
import threading
from typing import Any

import attrs
import pytest
import torch

from drawloom.components.data.rank_consistency import check_agreement
from drawloom.components.ports.data import Batch
from drawloom.graph import UserError


@attrs.define
class Threads:
    """A group whose ranks are threads."""

    size: int
    given: dict[int, Any] = attrs.field(factory=dict)
    barrier: Any = None

    def gather_json(self, value: Any) -> list[Any]:
        self.given[int(threading.current_thread().name)] = json.loads(json.dumps(value))
        self.barrier.wait(5)
        return [self.given[rank] for rank in range(self.size)]


def batch(token: int) -> Batch:
    rows = torch.full((2, 3), token)
    return Batch(tokens=rows, targets=rows, positions=rows, document_ids=rows, weights=rows.float())


def verdicts(*ranks: tuple[int, int, Batch]) -> list[str]:
    """What each rank, given by its replica, its number of rows and its batch, has to say; "" if nothing."""
    world: Any = Threads(len(ranks), barrier=threading.Barrier(len(ranks)))
    said = [""] * len(ranks)

    def compare(rank: int) -> None:
        try:
            check_agreement(world, *ranks[rank])
        except UserError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=compare, args=(rank,), name=str(rank)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def test_ranks_of_a_replica_see_the_same() -> None:
    """Equal batches in each replica are fine, and different replicas may see different rows."""
    assert verdicts((0, 9, batch(1)), (0, 9, batch(1)), (1, 9, batch(2)), (1, 9, batch(2))) == [""] * 4


def test_difference_in_a_replica_is_an_error_on_every_rank() -> None:
    """Two ranks of one replica with different batches are named, by all ranks alike."""
    said = verdicts((0, 9, batch(1)), (1, 9, batch(2)), (0, 9, batch(1)), (1, 9, batch(3)))
    assert said == [said[0]] * 4
    assert said[0].startswith("data: ranks 1 and 3 share replica 1, and see different rows")


@pytest.mark.parametrize("name", ["tokens", "targets", "positions", "document_ids"])
def test_every_part_of_a_batch_counts(name: str) -> None:
    """A difference in any tensor, or in nothing but its shape, is one."""
    other = attrs.evolve(batch(1), **{name: torch.tensor([[1, 1, 1], [1, 1, 2]])})
    assert verdicts((0, 9, batch(1)), (0, 9, other))[0]
    other = attrs.evolve(batch(1), **{name: torch.ones(3, 2, dtype=torch.int64)})
    assert verdicts((0, 9, batch(1)), (0, 9, other))[0]


def test_other_numbers_of_rows_are_an_error() -> None:
    """Replicas that do not divide the same rows are found even if their first batches agree."""
    said = verdicts((0, 9, batch(1)), (1, 8, batch(1)))
    assert said[0] == said[1]
    assert said[0].startswith("data: ranks 0 and 1 have 9 and 8 rows to learn from")
