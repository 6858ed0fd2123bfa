"""Differences between ranks and one process, and their explanations."""

from collections.abc import Sequence

import attrs
import pytest
import torch
from torch import Tensor

from drawloom.components.ports.distributed import PerDimension
from drawloom.components.ports.slices import TensorSlice
from drawloom.components.proving.compare import find_first_difference, measure_errors
from drawloom.components.proving.recorder import GRADIENT, PhaseSnapshot, RankPiece, RankRecord

WHOLE = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
OTHER = torch.tensor([0.3, 0.1, -0.2, 0.9], dtype=torch.float64)


def record(pieces: dict[str, RankPiece], tensor: int = 0, **values: dict[str, Tensor]) -> RankRecord:
    """Return a rank's record with one phase; `tensor` is its index."""
    indices = attrs.evolve(PerDimension.of_first_rank(), tensor=tensor)
    snapshot = PhaseSnapshot(1, "sync_gradients", values.get("parts", {}), values.get("numbers", {}), pieces)
    return RankRecord(indices, [snapshot], values.get("exported", {}))


def explain(parts: Sequence[Tensor], name: str = f"{GRADIENT}norm.weight") -> str:
    """Explain two tensor ranks' values for WHOLE; "" without a difference."""
    ranks = [record({name: RankPiece(part)}, index) for index, part in enumerate(parts)]
    difference = find_first_difference(record({name: RankPiece(WHOLE)}), ranks, {"tensor": 2}, lambda value: 1e-9)
    return difference.cause if difference else ""


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ([WHOLE, WHOLE], ""),
        ([WHOLE * (1 + 1e-12), WHOLE], ""),
        ([WHOLE * 0.41, WHOLE * 0.59], "a partial sum over tensor: ranks hold 0.41 and 0.59 of it"),
        ([WHOLE + OTHER, -OTHER], "a partial sum over tensor"),
        ([WHOLE + OTHER, WHOLE - OTHER], "their mean is right"),
        ([WHOLE, WHOLE + OTHER], "ranks 1 hold 1 and"),
        ([2 * WHOLE] * 2, "exactly 2 times too large: every rank along tensor"),
        ([WHOLE / 2] * 2, "exactly 1/2 of it"),
        ([WHOLE * 1.25] * 2, "1.25 times one process's"),
        ([WHOLE * 0] * 2, "it is 0"),
        ([WHOLE + OTHER] * 2, "not a multiple"),
        ([WHOLE * (1 + 1e-7)] * 2, "rounded to another dtype"),
        ([WHOLE[:2]] * 2, "ranks have the shape (2,), and one process has (4,)"),
    ],
)
def test_a_wrong_tensor_names_the_missing_operation(parts: Sequence[Tensor], sentence: str) -> None:
    """Sum, mean and ratio to one process's tensor distinguish the faults."""
    assert sentence in explain(parts) if sentence else not explain(parts)


def test_slices_are_compared_with_their_part_of_the_whole() -> None:
    """A rank's slice is compared with the same elements; elements without a rank are lost."""
    halves = [RankPiece(WHOLE[at : at + 2].clone(), TensorSlice((4,), (at,), (2,))) for at in (0, 2)]
    one = record({"a": RankPiece(WHOLE)})
    assert find_first_difference(one, [record({"a": half}) for half in halves], {}, lambda value: 0) is None
    halves[1].tensor[0] += 1
    wrong = find_first_difference(one, [record({"a": half}) for half in halves], {}, lambda value: 0)
    assert wrong is not None and wrong.name == "a"
    lost = find_first_difference(one, [record({}), record({})], {"data_shard": 2}, lambda value: 0)
    assert lost is not None and "no rank has it" in lost.cause
    half = find_first_difference(one, [record({"a": halves[0]})], {"data_shard": 2}, lambda value: 0)
    assert half is not None and "some ranks lack it" in half.cause


def test_copies_of_slices_may_be_partial_sums() -> None:
    """Two shards with two copies each, which add up to the shard, are a partial sum."""
    slices = [TensorSlice((4,), (at,), (2,)) for at in (0, 2)]
    pieces = [RankPiece(WHOLE[part.index()] * share, part) for part in slices for share in (0.3, 0.7)]
    ranks = [record({"a": piece}) for piece in pieces]
    difference = find_first_difference(record({"a": RankPiece(WHOLE)}), ranks, {"data_replicate": 2}, lambda value: 0)
    assert difference is not None and difference.cause.startswith("a partial sum over data_replicate")


def test_sums_of_losses_are_added_up_and_equal_along_tensor() -> None:
    """Ranks with other tokens add up to one process's sum; ranks along `tensor` have the same one."""
    one = record({}, parts={"loss": torch.tensor(6.0)})
    split = [record({}, parts={"loss": torch.tensor(part)}) for part in (2.0, 4.0)]
    assert find_first_difference(one, split, {"context": 2}, lambda value: 0) is None
    same = [record({}, index, parts={"loss": torch.tensor(6.0)}) for index in (0, 1)]
    assert find_first_difference(one, same, {"tensor": 2}, lambda value: 0) is None
    halves = [record({}, index, parts={"loss": torch.tensor(3.0)}) for index in (0, 1)]
    difference = find_first_difference(one, halves, {"tensor": 2}, lambda value: 0)
    assert difference is not None and difference.cause.startswith("exactly 1/2 of it")


def test_the_difference_nearest_to_the_loss_comes_first() -> None:
    """The last parameter's wrong gradient is named, before the norm, and after the step's other numbers."""
    names = [f"{GRADIENT}{name}" for name in "abc"]
    numbers = {"grad_norm": torch.ones(()), "tokens": torch.ones(())}
    one = record({name: RankPiece(WHOLE) for name in names}, numbers=numbers)
    wrong = {name: RankPiece(WHOLE * (1 if name == names[2] else 2)) for name in names}
    other = record(wrong, numbers=numbers | {"grad_norm": torch.zeros(())})
    difference = find_first_difference(one, [other], {}, lambda value: 0)
    assert difference is not None and difference.name == names[1]
    other.snapshots[0] = attrs.evolve(other.snapshots[0], numbers=numbers | {"tokens": torch.zeros(())})
    difference = find_first_difference(one, [other], {}, lambda value: 0)
    assert difference is not None and difference.name == "tokens"


def test_errors_of_slices_are_relative_to_the_whole() -> None:
    """A small slice's error counts by its share; of copies, and of runs, the largest error counts."""
    slices = [TensorSlice((4,), (at,), (2,)) for at in (0, 2)]
    pieces = [RankPiece(WHOLE[part.index()].clone(), part) for part in slices for _ in "ab"]
    pieces[3].tensor[1] += 0.3
    one, ranks = record({"a": RankPiece(WHOLE)}), [record({"a": piece}) for piece in pieces]
    [error] = measure_errors(one, [one] * 4, ranks).values()
    assert error == pytest.approx(0.3 / float(WHOLE.norm()))


def test_a_rank_is_compared_with_itself() -> None:
    """A slice before a kill is compared with the slice after it."""
    before, after = (RankPiece(WHOLE[2:].clone(), TensorSlice((4,), (2,), (2,))) for _ in "ab")
    assert find_first_difference(record({"a": before}), [record({"a": after})], {}, lambda value: 0) is None
    after.tensor[0] += 1e-12
    assert find_first_difference(record({"a": before}), [record({"a": after})], {}, lambda value: 0) is not None
