"""
Snapshot after a step: this rank's part of the state, from all stateful nodes.

Tensors of sharded nodes are saved as slices, one per rank, and assembled again for any layout of ranks.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.components.state.trees import map_leaves, map_leaves_with_path
from drawloom.components.storage.state_tree import PackedState, Tree, pack_state
from drawloom.ports import (
    Group,
    GrowingState,
    LocalState,
    SlicedState,
    SlicedTensor,
    Stager,
    Stateful,
    Step,
    TensorSlice,
)


def is_rank_local(node: Stateful) -> bool:
    """Return whether ranks have separate states."""
    return isinstance(node, LocalState) and node.state_is_local


def slices_by_sharded_entry(node: Stateful) -> Mapping[str, TensorSlice | None] | None:
    """Return a sharded state's entries on this rank with their slices; None if the state is not sharded."""
    return node.state_slices() if isinstance(node, SlicedState) else None


@attrs.frozen
class Snapshot:
    """One rank's part of a checkpoint: a tree, its named tensors, their bytes, and the step's metrics."""

    tree: Tree
    tensors: dict[str, Tensor] | Future[dict[str, Tensor]]
    bytes: int
    values: dict[str, float | None]

    def wait_for_tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, any shape and dtype, after waiting for all copies."""
        return self.tensors.result() if isinstance(self.tensors, Future) else self.tensors


@attrs.frozen
class ShardPlan:
    """
    This rank's part of the state: rank 0 saves replicated state, every rank its local state.

    `sharded` has the sharded nodes, with the entries to save and their slices. If several ranks have the same slice of
    an entry, the lowest rank saves it.
    """

    replicated: list[str]
    local: list[str]
    sharded: dict[str, dict[str, TensorSlice | None]]
    rank: int

    @classmethod
    def compare_across_ranks(cls, states: Mapping[str, Stateful], group: Group) -> "ShardPlan":
        """Compare all ranks' nodes. A collective over all ranks."""
        slices = {
            name: entries for name, node in states.items() if (entries := slices_by_sharded_entry(node)) is not None
        }
        own = {
            name: {entry: part and [[*part.offsets], [*part.size]] for entry, part in entries.items()}
            for name, entries in slices.items()
        }
        local = [name for name, node in states.items() if is_rank_local(node)]
        earlier = group.gather_json(own)[: group.rank]
        sharded = {
            name: {
                entry: part
                for entry, part in entries.items()
                if not any((entry, own[name][entry]) in others.get(name, {}).items() for others in earlier)
            }
            for name, entries in slices.items()
        }
        return cls([name for name in states if name not in (*local, *own)], local, sharded, group.rank)

    def take_snapshot(self, states: Mapping[str, Stateful], step: Step, stager: Stager | None = None) -> Snapshot:
        """
        Return this rank's part of the state; a stager copies it, so the state may change while it is
        written.
        """
        tree, tensors = self._pack_states_of_rank({name: node.state_dict for name, node in states.items()})
        count = sum(tensor.nbytes for tensor in tensors.values())
        return Snapshot(tree, tensors if stager is None else stager.stage(tensors), count, _collect_metrics(step))

    def forecast_bytes(self, states: Mapping[str, Stateful], growing: Mapping[str, GrowingState]) -> int:
        """Estimate this rank's checkpoint bytes once all state exists."""
        sources = {name: node.state_dict for name, node in states.items()}
        tree, tensors = self._pack_states_of_rank(
            sources | {name: node.forecast_state_after_first_step for name, node in growing.items()}
        )
        # twice the tree: it is a file, and headers of tensor files repeat its names, with shapes, dtypes and offsets
        return sum(tensor.nbytes for tensor in tensors.values()) + 2 * len(json.dumps(tree))

    def _pack_states_of_rank(self, sources: Mapping[str, Callable[[], dict[str, Any]]]) -> PackedState:
        """Pack this rank's part of the functions' states."""
        own_part: dict[str, dict[str, Any]] = {}
        for name, source in sources.items():
            if name in self.sharded:
                slices = self.sharded[name]
                own_part[name] = {
                    key: mark_slices(part, slices[key]) for key, part in source().items() if key in slices
                }
            elif self.rank == 0 or name in self.local:
                own_part[name] = source()
        return pack_state(own_part)


def _collect_metrics(step: Step) -> dict[str, float | None]:
    """Return a step's metrics by name, with None for non-finite values; a skipped step has no loss."""
    values = {name: number if math.isfinite(number) else None for name, number in step.state.numbers().items()}
    return values | {"loss": None} if values.get("skip") else values


def mark_slices(state: Any, tensor_slice: TensorSlice | None) -> Any:
    """
    Mark an entry's tensors, which have the slice's shape, as slices; without a slice, return the state
    unchanged.
    """
    if tensor_slice is None:
        return state
    return map_leaves(
        lambda leaf: SlicedTensor(leaf, tensor_slice) if _has_ndim_of_whole_tensor(leaf, tensor_slice) else leaf, state
    )


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
            and _has_ndim_of_whole_tensor(leaf, tensor_slice)
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


def _has_ndim_of_whole_tensor(leaf: Any, tensor_slice: TensorSlice) -> bool:
    """Return whether a leaf has the dimensions of the slice's whole tensor."""
    # other tensors, such as a step counter without dimensions, are not sliced
    return isinstance(leaf, Tensor) and leaf.ndim == len(tensor_slice.shape) > 0


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
