"""
Exchange of states in ranks' memory: copies for neighbours, and parts from other ranks after a loss.

A rank's part of the state is packed like a checkpoint: a tree, and tensors that are marked as slices. So parts are
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

from drawloom.components.checkpoint.reader import Parts, PieceReader, Slices, Uses
from drawloom.components.checkpoint.snapshot import (
    find_rows_unless_all,
    is_rank_local,
    mark_slices,
    slices_by_sharded_entry,
)
from drawloom.components.distributed.mesh_layout import MODEL
from drawloom.components.ports.checkpoint import Stateful
from drawloom.components.ports.distributed import Group, Mesh
from drawloom.components.ports.slices import TensorSlice
from drawloom.components.storage.state_tree import (
    PackedState,
    Tree,
    iterate_tensor_names_and_slices,
    list_dict_entries,
    pack_state,
)
from drawloom.components.storage.tensor_source import view_bytes

ROUND = 2**25  # bytes sent from one rank to another at once
ALIGNMENT = 16  # bytes; views of a buffer in any dtype start at a multiple of it


@attrs.frozen(order=True)
class PartKey:
    """A rank's part of the state after a step: the mesh's sizes along MODEL, and the rank's indices."""

    step: int
    sizes: tuple[int, ...]
    indices: tuple[int, ...]

    @classmethod
    def of_this_rank(cls, step: int, mesh: Mesh) -> "PartKey":
        """Return this rank's key."""
        sizes, indices = (attrs.asdict(numbers) for numbers in (mesh.sizes, mesh.indices))
        return cls(step, tuple(sizes[name] for name in MODEL), tuple(indices[name] for name in MODEL))

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> "PartKey":
        """Return the key in a JSON value."""
        step, sizes, indices = values
        return cls(step, tuple(sizes), tuple(indices))

    def to_json(self) -> list[Any]:
        """Return the key as a JSON value."""
        return [self.step, [*self.sizes], [*self.indices]]


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
    """Rows of a named tensor, wanted from a rank in a group; `shape` is theirs."""

    source: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    first: int = 0

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> "TensorRequest":
        """Return the request in a JSON value."""
        source, name, dtype, shape, first = values
        return cls(source, name, dtype, tuple(shape), first)

    def to_json(self) -> list[Any]:
        """Return the request as a JSON value."""
        return [*attrs.astuple(self)]

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize


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
    by_pair = {
        (receiver, source): _divide_into_rounds(
            [index for index, request in enumerate(wanted) if request.source == source], wanted
        )
        for receiver, wanted in enumerate(requests)
        for source in range(group.size)
    }
    for number in range(max(map(len, by_pair.values()), default=0)):
        parts = [
            [
                _view_as_bytes(_select_requested_rows(tensors, requests[receiver][index]))
                for index in _get_round_or_empty(by_pair[receiver, group.rank], number)
            ]
            for receiver in range(group.size)
        ]
        sent = [sum(map(len, listed)) for listed in parts]
        outgoing = torch.empty(sum(sent), dtype=torch.uint8, device=group.device)
        for target, part in zip(
            torch.split(outgoing, [len(part) for listed in parts for part in listed]),
            itertools.chain.from_iterable(parts),
            strict=True,
        ):
            target.copy_(part)
        incoming = [_get_round_or_empty(by_pair[group.rank, source], number) for source in range(group.size)]
        sizes = [sum(requests[group.rank][index].bytes for index in indices) for indices in incoming]
        data = group.all_to_all(outgoing, sent, sizes)
        order = [index for indices in incoming for index in indices]
        for index, part in zip(order, torch.split(data, [received[index].nbytes for index in order]), strict=True):
            _view_as_bytes(received[index]).copy_(part)
    return received


def exchange_copies_with_neighbours(group: Group, sources: Sequence[int], state: HeldState) -> NeighbourCopy:
    """
    Send this rank's part of the state to the rank that keeps it, and return the copy that this rank keeps.

    `sources` are the ranks in the group whose copies ranks keep, by rank. All ranks in the group call this.
    """
    packed = state.pack()
    own = [state.key.to_json(), packed.tree, _list_specs_as_json(packed), compute_digest(packed.tensors.values())]
    parts = group.gather_json(own)
    requests = [
        [TensorRequest(source, name, dtype, shape) for name, dtype, shape in _parse_specs(parts[source][2])]
        for source in sources
    ]
    key, tree, specs, digest = parts[sources[group.rank]]
    tensors = exchange_tensors(group, packed.tensors, requests)
    names = [name for name, _, _ in _parse_specs(specs)]
    return NeighbourCopy(PartKey.from_json(key), PackedState(tree, dict(zip(names, tensors, strict=True))), digest)


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
) -> dict[str, Any]:
    """
    Return the nodes' states for this rank from all parts of a step, without states that differ by rank.

    `sources` has the parts' ranks, and `own` the parts in this rank's memory. All ranks in the group call this.
    """
    keys = sorted(sources)
    described = {
        str(number): [own[key].tree, _list_specs_as_json(own[key])]
        for number, key in enumerate(keys)
        if sources[key] == group.rank
    }
    parts = {int(number): part for gathered in group.gather_json(described) for number, part in gathered.items()}
    readable = [number for number, key in enumerate(keys) if key in own]
    order = [*readable, *(number for number in range(len(keys)) if number not in readable)]
    slices = {name: slices_by_sharded_entry(node) for name, node in nodes.items()}
    reader = MemoryReader(
        trees=_remove_duplicates({number: parts[number][0] for number in order}, slices),
        specs={number: {name: spec for name, *spec in parts[number][1]} for number in order},
        tensors={number: own[keys[number]].tensors for number in readable},
    )

    def pick(_number: int, node: str) -> Slices | bool:
        wanted = slices.get(node)
        return node in nodes if wanted is None else wanted

    wanted = [
        (number, name, part)
        for number in order
        if number not in reader.tensors
        for name, part in reader.list_needed_tensors_with_rows(number, reader.pick_trees_and_find_uses(number, pick)[1])
    ]
    requests = [reader.make_request(number, name, part, sources[keys[number]]) for number, name, part in wanted]
    gathered = group.gather_json([request.to_json() for request in requests])
    offered = {
        f"{number} {name}": tensor
        for number, key in enumerate(keys)
        if sources[key] == group.rank
        for name, tensor in own[key].tensors.items()
    }
    received = exchange_tensors(group, offered, [[*map(TensorRequest.from_json, values)] for values in gathered])
    for (number, name, part), tensor in zip(wanted, received, strict=True):
        reader.received.setdefault(number, {})[name] = tensor, part
    return reader.read_and_join_states(order, pick)


@attrs.define
class MemoryReader(PieceReader):
    """
    Reader for parts of the state in ranks' memory, by the parts' numbers.

    `specs` has dtypes and shapes, `tensors` are on this rank, and `received` comes from other ranks.
    """

    trees: Mapping[int, dict[str, Tree]]
    specs: Mapping[int, Mapping[str, Sequence[Any]]]
    tensors: Mapping[int, Mapping[str, Tensor]]
    received: dict[int, Parts] = attrs.field(factory=dict)

    def read_trees_by_node(self, rank: int) -> dict[str, Tree]:
        return self.trees[rank]

    def read_tensors(self, rank: int, uses: Uses) -> Parts:
        """Return a part's used tensors, which are on this rank or were received."""
        if rank in self.tensors:
            return {name: (self.tensors[rank][name], None) for name in uses}
        return {name: self.received[rank][name] for name in uses}

    def list_needed_tensors_with_rows(self, number: int, uses: Uses) -> list[tuple[str, TensorSlice | None]]:
        """Return a part's used tensors with their necessary rows."""
        return [(name, find_rows_unless_all(tuple(self.specs[number][name][1]), pairs)) for name, pairs in uses.items()]

    def make_request(self, number: int, name: str, part: TensorSlice | None, source: int) -> TensorRequest:
        """Return the request for rows of a tensor; None for all rows."""
        dtype, shape = self.specs[number][name]
        if part is None:
            return TensorRequest(source, f"{number} {name}", dtype, tuple(shape))
        return TensorRequest(source, f"{number} {name}", dtype, part.size, part.offsets[0])


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


def _list_specs_as_json(packed: PackedState) -> list[list[Any]]:
    """Return packed tensors' names, dtypes and shapes as JSON."""
    return [
        [name, str(tensor.dtype).removeprefix("torch."), [*tensor.shape]] for name, tensor in packed.tensors.items()
    ]


def _parse_specs(specs: Sequence[Sequence[Any]]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, dtype, tuple(shape)) for name, dtype, shape in specs]


def _allocate_requested(requests: Sequence[TensorRequest]) -> list[Tensor]:
    """Return memory for requested tensors, as views into one buffer."""
    starts = [0]
    for request in requests:
        starts.append(starts[-1] + -(-request.bytes // ALIGNMENT) * ALIGNMENT)
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    return [
        buffer[start : start + request.bytes].view(getattr(torch, request.dtype)).view(request.shape)
        for start, request in zip(starts, requests, strict=False)
    ]


def _divide_into_rounds(indices: Sequence[int], requests: Sequence[TensorRequest]) -> list[list[int]]:
    """Divide the requests with these indices into rounds of at most ROUND bytes or a single request."""
    rounds: list[list[int]] = []
    size = 0
    for index in indices:
        if not rounds or size + requests[index].bytes > ROUND:
            rounds.append([])
            size = 0
        rounds[-1].append(index)
        size += requests[index].bytes
    return rounds


def _get_round_or_empty(rounds: Sequence[Sequence[int]], number: int) -> Sequence[int]:
    return rounds[number] if number < len(rounds) else []


def _select_requested_rows(tensors: Mapping[str, Tensor], request: TensorRequest) -> Tensor:
    """Return the requested rows."""
    tensor = tensors[request.name]
    return tensor if tensor.shape == request.shape else tensor[request.first : request.first + request.shape[0]]


def _view_as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, uint8 (bytes,); copies only if necessary."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
