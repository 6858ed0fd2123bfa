"""
A snapshot of the state after a step: the part of every stateful node that this rank saves.

Tensors of sharded nodes are saved as the slices that ranks hold, and put together from those of any layout of ranks.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.components.ports.distributed import Group
from drawloom.components.ports.run import GrowingState, LocalState, SlicedState, Stateful, Step
from drawloom.components.ports.slices import SlicedTensor, TensorSlice
from drawloom.components.ports.staging import Stager
from drawloom.components.state.trees import transform, transform_with_path
from drawloom.components.storage.state_tree import Packed, Tree, pack


def is_local(node: Stateful) -> bool:
    """Whether each rank has a separate state."""
    return isinstance(node, LocalState) and node.state_is_local


def slices_of(node: Stateful) -> Mapping[str, TensorSlice | None] | None:
    """The entries that this rank holds, each with its slice, if the state is sharded over ranks; else None."""
    return node.state_slices() if isinstance(node, SlicedState) else None


@attrs.frozen
class Snapshot:
    """A rank's part of a checkpoint: a tree, the tensors that it names, their bytes, and the step's metrics."""

    tree: Tree
    tensors: dict[str, Tensor] | Future[dict[str, Tensor]]
    bytes: int
    values: dict[str, float | None]

    def ready(self) -> dict[str, Tensor]:
        """The tensors by name, of any shape and dtype; waits until all copies are made."""
        return self.tensors.result() if isinstance(self.tensors, Future) else self.tensors


@attrs.frozen
class ShardPlan:
    """
    Which part of the state this rank saves: rank 0 saves replicated state, each rank its local state.

    `sharded` has the nodes whose entries are sharded, and for each the entries, with their slices, of which no lower
    rank holds the same slice: what several ranks hold is saved once, by the lowest of them.
    """

    replicated: list[str]
    local: list[str]
    sharded: dict[str, dict[str, TensorSlice | None]]
    rank: int

    @classmethod
    def of(cls, states: Mapping[str, Stateful], group: Group) -> "ShardPlan":
        """Compare the nodes of all ranks; all ranks call this."""
        slices = {name: found for name, node in states.items() if (found := slices_of(node)) is not None}
        held = {name: {entry: _as_json(place) for entry, place in found.items()} for name, found in slices.items()}
        local = [name for name, node in states.items() if is_local(node)]
        earlier = group.gather_json(held)[: group.rank]
        sharded = {
            name: {
                entry: place
                for entry, place in found.items()
                if not any(_has(name, entry, held[name][entry], each) for each in earlier)
            }
            for name, found in slices.items()
        }
        return cls([name for name in states if name not in (*local, *held)], local, sharded, group.rank)

    def take(self, states: Mapping[str, Stateful], step: Step, stager: Stager | None = None) -> Snapshot:
        """This rank's part of the state; a stager copies it, so that the state may change while it is written."""
        tree, tensors = self._pack({name: node.state_dict for name, node in states.items()})
        count = sum(tensor.nbytes for tensor in tensors.values())
        return Snapshot(tree, tensors if stager is None else stager.stage(tensors), count, _values(step))

    def forecast_bytes(self, states: Mapping[str, Stateful], growing: Mapping[str, GrowingState]) -> int:
        """Return about how many bytes this rank writes into a checkpoint once all state exists."""
        sources = {name: node.state_dict for name, node in states.items()}
        tree, tensors = self._pack(sources | {name: node.forecast_state for name, node in growing.items()})
        # the tree is a file; headers of the tensors' files repeat its names, with shapes, dtypes and offsets
        return sum(tensor.nbytes for tensor in tensors.values()) + 2 * len(json.dumps(tree))

    def _pack(self, sources: Mapping[str, Callable[[], dict[str, Any]]]) -> Packed:
        """Return this rank's part of the functions' states."""
        mine: dict[str, dict[str, Any]] = {}
        for name, source in sources.items():
            if name in self.sharded:
                places = self.sharded[name]
                mine[name] = {key: mark(part, places[key]) for key, part in source().items() if key in places}
            elif self.rank == 0 or name in self.local:
                mine[name] = source()
        return pack(mine)


def _as_json(place: TensorSlice | None) -> list[list[int]] | None:
    return None if place is None else [[*place.offsets], [*place.size]]


def _has(node: str, entry: str, place: list[list[int]] | None, held: Mapping[str, Any]) -> bool:
    """Whether a rank that holds these entries has a slice of one of them."""
    return entry in held.get(node, {}) and held[node][entry] == place


def _values(step: Step) -> dict[str, float | None]:
    """Return the numbers of a step by name, None for one that is not finite; a skipped step has no loss."""
    values = {name: number if math.isfinite(number) else None for name, number in step.state.numbers().items()}
    return values | {"loss": None} if values.get("skip") else values


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
        raise ValueError(f"the checkpoint has {count} of the {wanted.numel} elements of a slice")
    return joined


def _with_paths(state: Any) -> list[tuple[tuple[Any, ...], Any]]:
    found: list[tuple[tuple[Any, ...], Any]] = []
    transform_with_path(lambda path, leaf: found.append((path, leaf)), state)
    return found
