"""Assemble entries of the state from the pieces that ranks saved, for any layout of ranks."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from drawloom.components.checkpoint.snapshot import has_ndim_of_whole_tensor
from drawloom.components.state.trees import map_leaves_with_path
from drawloom.ports import SlicedTensor, TensorSlice


def assemble_pieces(pieces: Sequence[Any], tensor_slice: TensorSlice | None) -> Any:
    """
    Assemble an entry's state from the pieces saved by ranks: its tensors cover `tensor_slice`, or are whole.

    Tensors saved whole are cut. A tensor with another shape than `tensor_slice` stays whole, so its node can report
    the difference. Raises ValueError if the pieces do not cover a slice.
    """
    leaves = [dict(_list_leaves(piece)) for piece in pieces]

    def assemble_leaf(path: tuple[Any, ...], leaf: Any) -> Any:
        if isinstance(leaf, SlicedTensor):
            parts = [part for piece in leaves if isinstance(part := piece.get(path), SlicedTensor)]
            return _join_slices(parts, tensor_slice)
        if (
            tensor_slice is not None
            and has_ndim_of_whole_tensor(leaf, tensor_slice)
            and tuple(leaf.shape) == tensor_slice.shape
        ):
            return leaf[tensor_slice.index()].clone()
        return leaf

    return map_leaves_with_path(assemble_leaf, pieces[0])


def is_piece_needed(saved_slices: Sequence[TensorSlice], tensor_slice: TensorSlice | None) -> bool:
    """
    Return whether a piece saved with these slices overlaps `tensor_slice`; a piece without slices is always needed, for
    its structure.
    """
    if not saved_slices or tensor_slice is None or not tensor_slice.numel:
        return True
    return any(part.shape != tensor_slice.shape or part.overlap(tensor_slice) for part in saved_slices)


def find_rows_unless_all(
    shape: tuple[int, ...], uses: Iterable[tuple[TensorSlice | None, TensorSlice | None]]
) -> TensorSlice | None:
    """
    Return the necessary rows in a saved tensor with this shape, as a slice; None for all rows.

    A use is a pair: the saved tensor's slice (None for a whole tensor) and the slice to read. Rows are in the first
    dimension, so a row range is contiguous in the file.
    """
    spans: list[tuple[int, int]] = []
    for saved, wanted in uses:
        piece = saved or TensorSlice.whole(shape)
        if wanted is None or not shape or piece.size != shape or piece.shape != wanted.shape:
            return None
        if common := piece.overlap(wanted):
            first = common.offsets[0] - piece.offsets[0]
            spans.append((first, first + common.size[0]))
    start, end = min((first for first, _ in spans), default=0), max((last for _, last in spans), default=0)
    if end - start == shape[0]:
        return None
    return TensorSlice(shape, (start, *[0] * (len(shape) - 1)), (end - start, *shape[1:]))


def _join_slices(parts: Sequence[SlicedTensor], tensor_slice: TensorSlice | None) -> Tensor:
    shape = parts[0].tensor_slice.shape
    wanted = tensor_slice if tensor_slice is not None and tensor_slice.shape == shape else TensorSlice.whole(shape)
    for part in parts:
        if part.tensor_slice == wanted:
            return part.tensor
    joined = torch.empty(wanted.size, dtype=parts[0].tensor.dtype)
    count = 0
    for part in parts:
        if common := part.tensor_slice.overlap(wanted):
            joined[common.index(wanted)] = part.tensor[common.index(part.tensor_slice)]
            count += common.numel
    if count != wanted.numel:
        raise ValueError(f"the checkpoint has {count} of the {wanted.numel} elements of a slice")
    return joined


def _list_leaves(state: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Return a nested state's leaves as (path, leaf)."""
    leaves: list[tuple[tuple[Any, ...], Any]] = []
    map_leaves_with_path(lambda path, leaf: leaves.append((path, leaf)), state)
    return leaves
