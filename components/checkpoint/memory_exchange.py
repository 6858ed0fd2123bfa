"""
Exchange of parts of the state between ranks' memory, and assembly of a rank's states from them.

A rank's part is packed like a checkpoint: a tree, and tensors that are marked as slices. So parts are
assembled for any layout of ranks, such as one with fewer shards.
"""

import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.components.checkpoint.pieces import find_rows_unless_all
from drawloom.components.checkpoint.reader import Parts, PieceReader, Slices, Uses
from drawloom.components.checkpoint.snapshot import is_rank_local, mark_slices, slices_by_sharded_entry
from drawloom.components.distributed.mesh_layout import MODEL
from drawloom.components.storage.state_tree import (
    PackedState,
    Tree,
    iterate_tensor_names_and_slices,
    list_dict_entries,
    pack_state,
)
from drawloom.components.storage.tensor_source import TensorSpec, view_as_tensor, view_bytes
from drawloom.ports import Group, Mesh, NodeState, SlicedTensor, Stateful, TensorSlice

ROUND = 2**25  # bytes that a rank receives at once
ALIGNMENT = 16  # bytes; views of a buffer in any dtype start at a multiple of it


def _to_tuple(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(numbers)


@attrs.frozen(order=True)
class PartKey:
    """
    A rank's part of the state after a step: the mesh's sizes along MODEL, and the rank's indices. As JSON it is a dict.
    """

    step: int
    sizes: tuple[int, ...] = attrs.field(converter=_to_tuple)
    indices: tuple[int, ...] = attrs.field(converter=_to_tuple)

    @classmethod
    def of_this_rank(cls, step: int, mesh: Mesh) -> "PartKey":
        """Return this rank's key."""
        sizes, indices = (attrs.asdict(numbers) for numbers in (mesh.sizes, mesh.indices))
        return cls(step, [sizes[name] for name in MODEL], [indices[name] for name in MODEL])


@attrs.frozen
class HeldState:
    """All stateful nodes' states on this rank after a step, with the slices of sharded nodes."""

    key: PartKey
    states: Mapping[str, Any]
    slices: Mapping[str, Slices | None]
    local: frozenset[str]  # nodes whose states differ by rank

    @classmethod
    def from_nodes(cls, key: PartKey, nodes: Mapping[str, Stateful], states: Mapping[str, Any]) -> "HeldState":
        """Return the nodes' states."""
        slices = {name: slices_by_sharded_entry(node) for name, node in nodes.items()}
        return cls(key, states, slices, frozenset(name for name, node in nodes.items() if is_rank_local(node)))

    def pack(self) -> PackedState:
        """Return the states that do not differ by rank, with slices marked; tensors are not copied."""
        marked: dict[str, Any] = {}
        for name, state in self.states.items():
            slices = self.slices[name]
            if slices is not None:
                marked[name] = {entry: mark_slices(part, slices.get(entry)) for entry, part in state.items()}
            elif name not in self.local:
                marked[name] = state
        return pack_state(marked)


@attrs.frozen
class NeighbourCopy:
    """Copy of another rank's part of the state, with the digest that this rank has computed."""

    key: PartKey
    packed: PackedState
    digest: str

    def pack(self) -> PackedState:
        """Return the part."""
        return self.packed

    def is_intact(self) -> bool:
        """Return whether the copy has its digest."""
        return compute_digest(self.packed.tensors.values()) == self.digest


@attrs.frozen
class TensorRequest:
    """Rows of a named tensor from the row `first` on, wanted from a rank in a group. As JSON it is a dict."""

    source: int
    name: str
    dtype: str
    shape: tuple[int, ...] = attrs.field(converter=_to_tuple)
    first: int = 0

    @property
    def spec(self) -> TensorSpec:
        """The wanted rows' shape and dtype."""
        return TensorSpec(self.shape, getattr(torch, self.dtype))

    def select_bytes(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the wanted rows' bytes, uint8 (bytes,)."""
        tensor = tensors[self.name]
        if self.shape:  # a scalar has no rows
            tensor = tensor[self.first : self.first + self.shape[0]]
        return _view_as_bytes(tensor)


def compute_digest(tensors: Iterable[Tensor]) -> str:
    """Return the SHA-256 digest over the bytes in tensors, any shape and dtype."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(view_bytes(tensor))
    return digest.hexdigest()


def exchange_tensors(
    group: Group, tensors: Mapping[str, Tensor], requests: Sequence[Sequence[TensorRequest]]
) -> list[Tensor]:
    """
    Return the tensors that this rank requests, in order and in CPU memory, which is pinned if there is CUDA.

    `requests` are all ranks', by rank, and `tensors` are this rank's by name. All ranks in the group call this.
    """
    received = _allocate_requested(requests[group.rank])
    for batches in itertools.zip_longest(*map(_divide_into_rounds, requests), fillvalue=()):
        sent = [
            [request.select_bytes(tensors) for _, request in batch if request.source == group.rank] for batch in batches
        ]
        parts = (part.to(group.device) for listed in sent for part in listed)
        outgoing = torch.cat([torch.empty(0, dtype=torch.uint8, device=group.device), *parts])
        wanted = sorted(batches[group.rank], key=lambda item: item[1].source)
        sizes = [
            sum(request.spec.bytes for _, request in wanted if request.source == rank) for rank in range(group.size)
        ]
        data = group.all_to_all(outgoing, [sum(map(len, listed)) for listed in sent], sizes)
        for (index, _), part in zip(wanted, torch.split(data, [item.spec.bytes for _, item in wanted]), strict=True):
            _view_as_bytes(received[index]).copy_(part)
    return received


def exchange_copies_with_neighbours(group: Group, sources: Sequence[int], state: HeldState) -> NeighbourCopy:
    """
    Send this rank's part of the state to the rank that keeps it, and return the copy that this rank keeps.

    `sources` are the ranks in the group whose copies ranks keep, by rank. All ranks in the group call this.
    """
    packed = state.pack()
    specs, digest = _describe_tensors(packed), compute_digest(packed.tensors.values())
    parts = group.gather_json({"key": attrs.asdict(state.key), "tree": packed.tree, "specs": specs, "digest": digest})
    requests = [
        [TensorRequest(source, name, **spec) for name, spec in parts[source]["specs"].items()] for source in sources
    ]
    kept = parts[sources[group.rank]]
    tensors = dict(zip(kept["specs"], exchange_tensors(group, packed.tensors, requests), strict=True))
    return NeighbourCopy(PartKey(**kept["key"]), PackedState(kept["tree"], tensors), kept["digest"])


def find_newest_complete(offers: Sequence[Sequence[PartKey]]) -> dict[PartKey, int]:
    """
    Return the parts of the newest step for which ranks have every part, with a rank that has it.

    `offers` are the parts in memory, by rank. Empty if no step is complete.
    """
    sources: dict[PartKey, int] = {}
    for rank, keys in enumerate(offers):
        for key in keys:
            sources.setdefault(key, rank)
    steps = sorted({(key.step, key.sizes) for key in sources}, reverse=True)
    for step, sizes in steps:
        parts = {key: rank for key, rank in sources.items() if (key.step, key.sizes) == (step, sizes)}
        if len(parts) == math.prod(sizes):
            return parts
    return {}


def exchange_and_assemble_states(
    group: Group, nodes: Mapping[str, Stateful], sources: Mapping[PartKey, int], own: Mapping[PartKey, PackedState]
) -> NodeState:
    """
    Return the nodes' states for this rank from all parts of a step, without states that differ by rank.

    `sources` has the parts' ranks, and `own` the parts in this rank's memory. All ranks in the group call this.
    """
    keys = sorted(sources)
    described = {
        str(number): [own[key].tree, _describe_tensors(own[key])]
        for number, key in enumerate(keys)
        if sources[key] == group.rank
    }
    parts = {int(number): part for gathered in group.gather_json(described) for number, part in gathered.items()}
    order = sorted(range(len(keys)), key=lambda number: keys[number] not in own)  # parts on this rank first
    slices = {name: slices_by_sharded_entry(node) for name, node in nodes.items()}
    reader = MemoryReader(
        trees=_remove_duplicates({number: parts[number][0] for number in order}, slices),
        tensors={number: {**own[keys[number]].tensors} if keys[number] in own else {} for number in order},
    )

    def pick(_number: int, node: str) -> Slices | bool:
        wanted = slices.get(node)
        return node in nodes if wanted is None else wanted

    wanted: list[tuple[int, str, TensorSlice | None]] = []
    requests: list[TensorRequest] = []
    for number in order:
        if keys[number] not in own:
            for name, pairs in reader.pick_trees_and_find_uses(number, pick)[1].items():
                spec = parts[number][1][name]
                rows = find_rows_unless_all(tuple(spec["shape"]), pairs)
                request = TensorRequest(sources[keys[number]], f"{number} {name}", **spec)
                requests.append(attrs.evolve(request, shape=rows.size, first=rows.offsets[0]) if rows else request)
                wanted.append((number, name, rows))
    gathered = group.gather_json([attrs.asdict(request) for request in requests])
    offered = {
        f"{number} {name}": tensor
        for number, key in enumerate(keys)
        if sources[key] == group.rank
        for name, tensor in own[key].tensors.items()
    }
    received = exchange_tensors(group, offered, [[TensorRequest(**value) for value in values] for values in gathered])
    for (number, name, rows), tensor in zip(wanted, received, strict=True):
        reader.tensors[number][name] = SlicedTensor(tensor, rows) if rows else tensor
    return reader.read_and_join_states(order, pick)


@attrs.frozen
class MemoryReader(PieceReader):
    """Reader for parts of the state in this rank's memory, by the parts' numbers."""

    trees: Mapping[int, dict[str, Tree]]
    tensors: Mapping[int, Parts]

    def read_trees_by_node(self, rank: int) -> dict[str, Tree]:
        return self.trees[rank]

    def read_tensors(self, rank: int, uses: Uses) -> Parts:
        return {name: self.tensors[rank][name] for name in uses}


def _remove_duplicates(trees: Mapping[int, Tree], slices: Mapping[str, Slices | None]) -> dict[int, dict[str, Tree]]:
    """
    Return the parts' trees by node, without entries that an earlier part has with the same slices.

    Nodes without slices have equal states in all parts.
    """
    seen: set[Any] = set()
    kept: dict[int, dict[str, Tree]] = {}
    for number, tree in trees.items():
        kept[number] = {}
        for node, state in list_dict_entries(tree).items():
            if slices.get(node) is None:
                if (node,) not in seen:
                    kept[number][node] = state
                seen.add((node,))
                continue
            entries = {}
            for entry, value in list_dict_entries(state).items():
                signature = node, entry, tuple(part for _, part in iterate_tensor_names_and_slices(value))
                if signature not in seen:
                    entries[entry] = value
                seen.add(signature)
            kept[number][node] = {"dict": entries}
    return kept


def _describe_tensors(packed: PackedState) -> dict[str, dict[str, Any]]:
    """Return packed tensors' dtypes and shapes by name, as JSON."""
    return {
        name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": [*tensor.shape]}
        for name, tensor in packed.tensors.items()
    }


def _allocate_requested(requests: Sequence[TensorRequest]) -> list[Tensor]:
    """Return memory for requested tensors, as views into one buffer."""
    sizes = [request.spec.bytes for request in requests]
    starts = [0, *itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    return [
        view_as_tensor(buffer[start : start + size], request.spec)
        for start, size, request in zip(starts, sizes, requests, strict=False)
    ]


def _divide_into_rounds(requests: Sequence[TensorRequest]) -> list[list[tuple[int, TensorRequest]]]:
    """Divide a rank's requests, with their numbers, into rounds of at most ROUND bytes or a single request."""
    rounds: list[list[tuple[int, TensorRequest]]] = []
    size = 0
    for index, request in enumerate(requests):
        size += request.spec.bytes
        if not rounds or size > ROUND:
            rounds.append([])
            size = request.spec.bytes
        rounds[-1].append((index, request))
    return rounds


def _view_as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, uint8 (bytes,); copies only if necessary."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
