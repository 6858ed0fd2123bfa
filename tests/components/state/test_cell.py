"""The whole and the shards of one value."""

import pytest
import torch

from drawloom.components.state.cell import Cell
from drawloom.components.state.specs import Stack


def test_each_form_is_computed_once() -> None:
    """Reading again gives the same object, until something is written."""
    cell = Cell(2, None)
    cell.write_shard(0, torch.ones(1))
    cell.write_shard(1, torch.ones(1))
    whole = cell.read()
    assert cell.read() is whole
    cell.write_shard(1, torch.zeros(1))
    assert cell.read().tolist() == [1, 0]


def test_a_read_does_not_lose_the_other_form() -> None:
    """Shards of unequal sizes stay as they were after the whole is read, and the whole after the shards are."""
    cell = Cell(2, None)
    parts = [torch.arange(3), torch.arange(2)]
    for place, part in enumerate(parts):
        cell.write_shard(place, part)
    assert cell.read().tolist() == [0, 1, 2, 0, 1]
    assert [cell.read_shard(place) for place in range(2)] == parts


def test_a_failed_write_changes_nothing() -> None:
    """A shard of a whole that can't be sharded is refused, and the whole stays."""
    cell = Cell(2, None)
    cell.write(torch.arange(3))
    with pytest.raises(ValueError, match="evenly"):
        cell.write_shard(0, torch.ones(1))
    assert cell.read().tolist() == [0, 1, 2]


def test_the_inferred_spec_follows_the_last_write() -> None:
    """A number written as a whole is replicated, written by shards it is stacked; a given spec stays."""
    cell = Cell(2, None)
    cell.write(torch.tensor(5.0))
    assert [float(cell.read_shard(place)) for place in range(2)] == [5, 5]
    cell.write(torch.tensor([5.0, 6.0]))
    assert [cell.read_shard(place).tolist() for place in range(2)] == [[5], [6]]
    spec = Cell(2, Stack())
    spec.write(torch.tensor([5.0, 6.0]))
    assert [spec.read_shard(place).tolist() for place in range(2)] == [5, 6]
