"""The first difference between ranks and one process, and its likely cause."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, Literal, NamedTuple

import attrs
import torch
from torch import Tensor

from drawloom.components.proving.recorder import GRADIENT, PhaseSnapshot, RankPiece, RankRecord
from drawloom.components.proving.result import ProvedDifference
from drawloom.ports import DIMENSIONS, TensorSlice


class Key(NamedTuple):
    """Value after a phase: a part to be added up, a number common to all ranks, or pieces of a tensor."""

    step: int
    phase: str
    name: str
    kind: Literal["part", "number", "piece"]


SMALL = 1e-3
"""Norm of a tensor, relative to all tensors' norm, below which errors are relative to this fraction of all."""
EXACT = 1e-6
"""Relative error below which a ratio, or a sum over ranks, counts as found."""
LAST = ("grad_norm",)
"""Numbers that follow from gradients, compared after them."""
MAX_RANKS_SHOWN = 4


@attrs.frozen
class Compared:
    """
    A value of one process, and the pieces on ranks, None on a rank without one.

    Errors are relative to `scale` for a smaller value. `expected_slice` is the slice of a rank that is compared with
    itself.
    """

    key: Key
    expected: Tensor
    actual: Sequence[RankPiece | None]
    scale: float = 0.0
    expected_slice: TensorSlice | None = None

    @property
    def pieces(self) -> list[RankPiece]:
        """The pieces on ranks that have one."""
        return [piece for piece in self.actual if piece is not None]

    def get_expected_piece(self, piece: RankPiece) -> Tensor:
        """Return one process's elements for a rank's piece."""
        tensor_slice = piece.tensor_slice
        if tensor_slice is None or tensor_slice == self.expected_slice:
            return self.expected
        return self.expected[tensor_slice.index()]

    @property
    def is_complete(self) -> bool:
        """Whether ranks have all elements, and all ranks a number."""
        slices = {piece.tensor_slice for piece in self.pieces}
        count = sum(self.expected.numel() if part is None else part.numel for part in slices)
        return count >= self.expected.numel() and not (self.key.kind == "number" and None in self.actual)

    def compute_error(self) -> float:
        """Return the relative error of the whole, with the worst copy of each slice; infinity for missing elements."""
        if not self.is_complete:
            return math.inf
        distances: dict[TensorSlice | None, float] = {}
        for piece in self.pieces:
            distance = compute_distance(piece.tensor, self.get_expected_piece(piece))
            distances[piece.tensor_slice] = max(distance, distances.get(piece.tensor_slice, 0.0))
        return _divide_by_norm(math.hypot(*distances.values()), self.expected, self.scale)


def compute_distance(actual: Tensor, expected: Tensor) -> float:
    """Return |actual - expected|; infinity for other shapes, 0 for equal NaNs."""
    if actual.shape != expected.shape:
        return math.inf
    actual, expected = actual.double(), expected.double()
    difference = torch.where(actual.isnan() & expected.isnan(), 0.0, actual - expected)
    return float(difference.norm()) if difference.isfinite().all() else math.inf


def compute_relative_error(actual: Tensor, expected: Tensor, scale: float = 0.0) -> float:
    """Return |actual - expected| / max(|expected|, scale)."""
    return _divide_by_norm(compute_distance(actual, expected), expected, scale)


def _divide_by_norm(distance: float, expected: Tensor, scale: float) -> float:
    norm = max(float(expected.double().nan_to_num().norm()), scale)
    return distance / norm if norm else (math.inf if distance else 0.0)


def iterate_compared_values(one: RankRecord, ranks: Sequence[RankRecord]) -> Iterator[Compared]:
    """
    Yield one process's values in the order of computation.

    In a phase, sums of losses come first, then numbers, gradients from the last parameter to the first, as in a
    backward pass, weights, and the gradient norm. Exports come last.
    """
    for index, snapshot in enumerate(one.snapshots):
        others = [record.snapshots[index] for record in ranks if index < len(record.snapshots)]
        yield from _iterate_values_after_phase(snapshot, others, [record.indices.tensor for record in ranks])
    exported = {name: tensor for record in ranks for name, tensor in record.exported.items()}
    for name, tensor in one.exported.items():
        piece = RankPiece(exported[name]) if name in exported else None
        yield Compared(Key(one.snapshots[-1].step, "export", name, "piece"), tensor, [piece])


def _iterate_values_after_phase(
    one: PhaseSnapshot, others: Sequence[PhaseSnapshot], tensor_indices: Sequence[int]
) -> Iterator[Compared]:
    """Yield the values after a phase; `tensor_indices` are the ranks' indices along `tensor`."""
    make_key = partial(Key, one.step, one.phase)
    for name, part in one.parts.items():
        totals: dict[int, Tensor] = {}
        for other, index in zip(others, tensor_indices, strict=False):
            if name in other.parts:
                totals[index] = totals.get(index, torch.zeros_like(part)) + other.parts[name]
        yield Compared(make_key(name, "part"), part, [RankPiece(totals[index]) for index in sorted(totals)])
    gradients = [name for name in one.pieces if name.startswith(GRADIENT)]
    weights = [name for name in one.pieces if name not in gradients]
    for numbers, names in (
        ([name for name in one.numbers if name not in LAST], gradients[::-1]),
        ([], weights),
        ([name for name in one.numbers if name in LAST], []),
    ):
        for name in numbers:
            values = [RankPiece(other.numbers[name]) if name in other.numbers else None for other in others]
            yield Compared(make_key(name, "number"), one.numbers[name], values)
        squares = [one.pieces[name].tensor.double().square().sum() for name in names]
        for name in names:
            pieces = [other.pieces.get(name) for other in others]
            scale = SMALL * float(sum(squares)) ** 0.5
            piece = one.pieces[name]
            yield Compared(make_key(name, "piece"), piece.tensor, pieces, scale, piece.tensor_slice)


def measure_errors(one: RankRecord, *others: Sequence[RankRecord]) -> dict[Key, float]:
    """Return the largest relative error of every value, over other runs by rank."""
    errors: dict[Key, float] = {}
    for ranks in others:
        for value in iterate_compared_values(one, ranks):
            errors[value.key] = max(value.compute_error(), errors.get(value.key, 0.0))
    return errors


def find_first_difference(
    one: RankRecord, ranks: Sequence[RankRecord], sizes: Mapping[str, int], get_tolerance: Callable[[Compared], float]
) -> ProvedDifference | None:
    """Return the first value whose error is above its tolerance, on a mesh with `sizes` above 1 by dimension."""
    for value in iterate_compared_values(one, ranks):
        if (error := value.compute_error()) > get_tolerance(value):
            step, phase, name, _ = value.key
            return ProvedDifference(step, phase, name, error, explain_difference(value, ranks, sizes))
    return None


def explain_difference(value: Compared, ranks: Sequence[RankRecord], sizes: Mapping[str, int]) -> str:
    """Return a sentence with the axis and the operation that is most probably missing."""
    axis = " x ".join(sizes) or "microbatches"
    pieces = value.pieces
    if not value.is_complete:
        return f"it is lost along {axis}: {'some ranks lack' if pieces else 'no rank has'} it"
    expected = [value.get_expected_piece(piece) for piece in pieces]
    if any(piece.tensor.shape != part.shape for piece, part in zip(pieces, expected, strict=True)):
        return f"ranks have the shape {tuple(pieces[0].tensor.shape)}, and one process has {tuple(expected[0].shape)}"
    ratios = [_compute_ratio(piece.tensor, part) for piece, part in zip(pieces, expected, strict=True)]
    errors = [
        compute_relative_error(piece.tensor, part * ratio, value.scale)
        for piece, part, ratio in zip(pieces, expected, ratios, strict=True)
    ]
    shown = " and ".join(f"{ratio:.4g}" for ratio in ratios[:MAX_RANKS_SHOWN])
    copies: dict[TensorSlice | None, list[int]] = {}
    for number, piece in enumerate(pieces):
        copies.setdefault(piece.tensor_slice, []).append(number)
    if any(not pieces[number].tensor.equal(pieces[same[0]].tensor) for same in copies.values() for number in same):
        axis = _find_axis_with_other_values(value, ranks, sizes) or axis
        totals = {same[0]: sum(pieces[number].tensor.double() for number in same) for same in copies.values()}
        if _are_equal(totals, expected, value.scale):
            where = ", in the backward pass" if value.key.name.startswith(GRADIENT) else ""
            return f"a partial sum over {axis}: ranks hold {shown} of it; add it up over {axis}{where}"
        if _are_equal({same[0]: totals[same[0]] / len(same) for same in copies.values()}, expected, value.scale):
            return f"ranks along {axis} hold {shown} of it, and their mean is right: take the mean over {axis}"
        wrong = [rank for rank, ratio in enumerate(ratios) if abs(ratio - 1) > EXACT or errors[rank] > EXACT]
        return (
            f"ranks along {axis} differ, and should be equal: ranks {', '.join(map(str, wrong))} hold {shown} of it; "
            f"one of them lacks a sum or a broadcast over {axis}"
        )
    if max(errors) < EXACT and max(ratios) - min(ratios) < EXACT:
        return _explain_common_factor(ratios[0], axis, sizes)
    return (
        f"the values are others, not a multiple ({shown} of it in the right direction): a rank computes with its own "
        f"part along {axis}, where it needs the others' too"
    )


def _are_equal(tensors: Mapping[int, Any], expected: Sequence[Tensor], scale: float) -> bool:
    """Return whether tensors by rank are nearly equal to one process's."""
    return all(compute_relative_error(tensor, expected[rank], scale) < EXACT for rank, tensor in tensors.items())


def _explain_common_factor(ratio: float, axis: str, sizes: Mapping[str, int]) -> str:
    for count in sorted({*sizes.values(), prod(sizes.values())} - {1}):
        if abs(ratio - count) < EXACT:
            return (
                f"exactly {count} times too large: every rank along {axis} adds the whole; let one of them count, or "
                "leave out the sum"
            )
        if abs(ratio * count - 1) < EXACT:
            return f"exactly 1/{count} of it: only one rank's part along {axis}, or a mean where a sum is due"
    if abs(ratio - 1) < EXACT:
        return f"nearly right: along {axis}, numbers are rounded to another dtype"
    if abs(ratio) < EXACT:
        return f"it is 0: nothing is computed, or nothing arrives, along {axis}"
    return (
        f"{ratio:.6g} times one process's on all ranks, which is no simple factor: a count differs along {axis}, or a "
        "rank computes with its own part where it needs the others' too"
    )


def _compute_ratio(actual: Tensor, expected: Tensor) -> float:
    """Return the factor c with the smallest |actual - c expected|; 0 for an expected 0."""
    actual, expected = actual.double().flatten(), expected.double().flatten()
    square = float(expected @ expected)
    return float(actual @ expected) / square if square else 0.0


def _find_axis_with_other_values(value: Compared, ranks: Sequence[RankRecord], sizes: Mapping[str, int]) -> str:
    """Return the only mesh dimension along which ranks have other values, or ""."""
    if value.key.kind == "part":
        return "tensor"
    if len(value.actual) != len(ranks):
        return ""
    by_indices = {record.indices: piece for record, piece in zip(ranks, value.actual, strict=True) if piece}
    differing = set()
    for name in sizes.keys() & {*DIMENSIONS}:
        for indices, piece in by_indices.items():
            first = by_indices.get(attrs.evolve(indices, **{name: 0}))
            if first is not None and not piece.tensor.equal(first.tensor):
                differing.add(name)
    return differing.pop() if len(differing) == 1 else ""
