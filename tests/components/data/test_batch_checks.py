"""Equality of rows on ranks that must see the same ones."""

import json
import threading
from typing import Any

import attrs
import pytest
import torch

from drawloom.components.data.batch_checks import check_batch, check_ranks_have_consistent_batches
from drawloom.components.ports.data import TokenBatch
from drawloom.graph import UserError
from support.clips import ClipRows, clips


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


def batch(token: int) -> TokenBatch:
    rows = torch.full((2, 3), token)
    return TokenBatch(tokens=rows, targets=rows, positions=rows, document_ids=rows, weights=rows.float())


def errors_of(*ranks: tuple[int, int, TokenBatch]) -> list[str]:
    """Return the errors by rank ("" if none) for data-parallel indices, row counts and batches."""
    world: Any = Threads(len(ranks), barrier=threading.Barrier(len(ranks)))
    errors = [""] * len(ranks)

    def compare(rank: int) -> None:
        try:
            check_ranks_have_consistent_batches(world, *ranks[rank])
        except UserError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=compare, args=(rank,), name=str(rank)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_equal_batches_in_each_replica_pass() -> None:
    """Ranks with different data-parallel indices may see different rows."""
    assert errors_of((0, 9, batch(1)), (0, 9, batch(1)), (1, 9, batch(2)), (1, 9, batch(2))) == [""] * 4


def test_different_batches_in_a_replica_are_an_error_on_every_rank() -> None:
    """All ranks raise the same error naming the two differing ranks."""
    errors = errors_of((0, 9, batch(1)), (1, 9, batch(2)), (0, 9, batch(1)), (1, 9, batch(3)))
    assert errors == [errors[0]] * 4
    assert errors[0].startswith("data: ranks 1 and 3 have the same data-parallel index 1, and see different rows")


@pytest.mark.parametrize("name", ["tokens", "targets", "positions", "document_ids"])
def test_every_part_of_a_batch_counts(name: str) -> None:
    """A difference in any tensor, or only in its shape, is an error."""
    for tensor in (torch.tensor([[1, 1, 1], [1, 1, 2]]), torch.ones(3, 2, dtype=torch.int64)):
        change: dict[str, Any] = {name: tensor}
        assert errors_of((0, 9, batch(1)), (0, 9, batch(1).evolve(**change)))[0]


def test_different_numbers_of_rows_are_an_error() -> None:
    """Ranks with different numbers of rows are found even if their first batches agree."""
    errors = errors_of((0, 9, batch(1)), (1, 8, batch(1)))
    assert errors[0] == errors[1]
    assert errors[0].startswith("data: ranks 0 and 1 have 9 and 8 training rows")


def test_a_batch_of_another_class_than_declared_is_refused() -> None:
    """The first batch is looked at: its class, and whether its leaves fit together."""
    check_batch(ClipRows(), clips())
    with pytest.raises(
        UserError, match=r"^rows: ClipRows declares the batch class Clips, but returned a TokenBatch; correct one"
    ):
        check_batch(ClipRows(), batch(1))
    with pytest.raises(UserError, match=r"^rows: ClipRows makes .* do not fit together: Clips.labels has shape \(3,\)"):
        check_batch(ClipRows(), clips([0, 1]).evolve(labels=torch.ones(3)))
