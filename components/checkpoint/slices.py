"""States whose tensors are slices: cut for saving, and put together from those of any layout of ranks."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from drawloom.components.ports.slices import SlicedTensor, TensorSlice
from drawloom.components.storage.pytree import transform, transform_with_path


def mark(state: Any, place: TensorSlice | None) -> Any:
    """The state of an entry with its tensors, of the shape of the slice, marked as slices; the same without a slice."""
    if place is None:
        return state
    return transform(lambda leaf: SlicedTensor(leaf, place) if _is_sliced(leaf, place) else leaf, state)


def assemble(pieces: Sequence[Any], place: TensorSlice | None) -> Any:
    """
    The state of an entry from the pieces that ranks have saved: its tensors are the slice `place`, or whole.

    Tensors that were saved whole are cut. Where a tensor has another shape than `place` says it is given whole, so that
    its node can name the difference. Raises ValueError if the pieces do not cover a slice.
    """
    found = [dict(_with_paths(piece)) for piece in pieces]

    def one(path: tuple[Any, ...], leaf: Any) -> Any:
        if isinstance(leaf, SlicedTensor):
            return _joined([part for each in found if isinstance(part := each.get(path), SlicedTensor)], place)
        if place is not None and _is_sliced(leaf, place) and tuple(leaf.shape) == place.shape:
            return leaf[place.index()].clone()
        return leaf

    return transform_with_path(one, pieces[0])


def is_needed(saved: Sequence[TensorSlice], place: TensorSlice | None) -> bool:
    """Whether a piece with these slices is needed for the slice `place`; one without any is, for its structure."""
    if not saved or place is None or not place.numel:
        return True
    return any(each.shape != place.shape or each.overlap(place) for each in saved)


def needed_rows(
    shape: tuple[int, ...], uses: Iterable[tuple[TensorSlice | None, TensorSlice | None]]
) -> TensorSlice | None:
    """
    Which rows of a saved tensor of this shape are needed, as a slice of it; None if all are.

    Each use is the slice of a tensor that was saved, None for a whole one, and the slice that is wanted of it. Rows are
    those of the first dimension, which are in one piece in the file.
    """
    spans: list[tuple[int, int]] = []
    for saved, wanted in uses:
        place = saved or TensorSlice.whole(shape)
        if wanted is None or not shape or place.size != shape or place.shape != wanted.shape:
            return None
        if common := place.overlap(wanted):
            first = common.offsets[0] - place.offsets[0]
            spans.append((first, first + common.size[0]))
    start, end = min((first for first, _ in spans), default=0), max((last for _, last in spans), default=0)
    if end - start == shape[0]:
        return None
    return TensorSlice(shape, (start, *[0] * (len(shape) - 1)), (end - start, *shape[1:]))


def _is_sliced(leaf: Any, place: TensorSlice) -> bool:
    # A counter of steps, for example, is a tensor without dimensions.
    return isinstance(leaf, Tensor) and leaf.ndim == len(place.shape) > 0


def _joined(parts: Sequence[SlicedTensor], place: TensorSlice | None) -> Tensor:
    shape = parts[0].place.shape
    wanted = place if place is not None and place.shape == shape else TensorSlice.whole(shape)
    for part in parts:
        if part.place == wanted:
            return part.tensor
    joined = torch.empty(wanted.size, dtype=parts[0].tensor.dtype)
    count = 0
    for part in parts:
        if common := part.place.overlap(wanted):
            joined[common.index(wanted)] = part.tensor[common.index(part.place)]
            count += common.numel
    if count != wanted.numel:
        raise ValueError(f"{count} of {wanted.numel} elements of a slice are in the checkpoint")
    return joined


def _with_paths(state: Any) -> list[tuple[tuple[Any, ...], Any]]:
    found: list[tuple[tuple[Any, ...], Any]] = []
    transform_with_path(lambda path, leaf: found.append((path, leaf)), state)
    return found
