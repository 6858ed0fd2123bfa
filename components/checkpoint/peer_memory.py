"""
Exchange of states between ranks' memory: copies at neighbours during a run, and restoring after a loss.

A step's state is referenced at its end, when all ranks have ended it, and copied just before the next update changes
it. So replicas have one step in common at any time, and ranks that have just joined receive the state from a replica.

Without a replica, a lost rank's part is in its neighbour's memory, with all other parts of the same step (GEMINI, SOSP
2023). A copy is sent while the next step computes its gradients, when weights and optimizer state are constant;
training waits for it only before the next update. New copies replace older ones only after all ranks have them.

A rank's part is packed like a checkpoint: a tree, and tensors that are marked as slices. So parts are
assembled for any layout of ranks, such as one with fewer shards.
"""

import hashlib
import itertools
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom import internal
from drawloom.components.checkpoint.pieces import find_rows_unless_all
from drawloom.components.checkpoint.reader import Parts, PieceReader, Slices, Uses
from drawloom.components.checkpoint.snapshot import is_rank_local, mark_slices, slices_by_sharded_entry
from drawloom.components.checkpoint.staging.blocking import Blocking
from drawloom.components.distributed.mesh_layout import MODEL
from drawloom.components.distributed.rank_errors import run_and_gather_on_all_ranks
from drawloom.components.distributed.threads import submit_in_new_thread
from drawloom.components.state.trees import map_leaves
from drawloom.components.storage.state_tree import (
    PackedState,
    Tree,
    iterate_tensor_names_and_slices,
    list_dict_entries,
    pack_state,
)
from drawloom.components.storage.tensor_source import TensorSpec, view_as_tensor, view_bytes
from drawloom.ports import Cadence, Group, Mesh, NodeState, Processes, SlicedTensor, Stateful, Step, TensorSlice, is_due

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


CLOSE_TIMEOUT = 20.0  # seconds

log = logging.getLogger("drawloom.checkpoint")
run_log = logging.getLogger("drawloom.run")  # rank 0 prints its messages


@attrs.define(eq=False)
class StateMemory:
    """
    Memory for this rank's states after the last steps, and for a neighbour's.

    `copies_each_step` is False if a step that is only in this rank's memory would be useless.
    """

    copies_each_step: bool = True
    _stager: Blocking = internal(factory=Blocking)
    _copy: HeldState | None = internal(None)
    _current: HeldState | None = internal(None)
    _shared: HeldState | None = internal(None)  # of the step of the neighbours' copies
    _copies: tuple[NeighbourCopy, ...] = internal(())  # the newest one last

    def reference_states(self, key: PartKey, nodes: Mapping[str, Stateful]) -> HeldState:
        """Reference and return the state after a step. Tensors must not change before `replace_reference_by_copy`."""
        states = {name: node.state_dict() for name, node in nodes.items()}
        detached = map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, states)
        self._current = HeldState.from_nodes(key, nodes, detached)
        return self._current

    def replace_reference_by_copy(self) -> None:
        """Copy the referenced state, if there is one, in place of the older copy."""
        if self._current is None:
            return
        current, self._current, self._copy = self._current, None, None
        is_shared = bool(self._copies) and self._copies[-1].key.step == current.key.step
        if is_shared:
            self._shared = None
        if is_shared or self.copies_each_step:
            self._copy = attrs.evolve(current, states=self._stager.stage({**current.states}))
        if is_shared:
            self._shared = self._copy

    def add_neighbour(self, copy: NeighbourCopy) -> None:
        """Keep a neighbour's newest state, beside an older one until `drop_older_neighbour_copies`."""
        self._copies = (*self._copies, copy)

    def drop_older_neighbour_copies(self) -> None:
        """Drop neighbours' older states. All ranks have added newer ones."""
        self._copies = self._copies[-1:]

    def list_intact_parts(self) -> dict[PartKey, HeldState | NeighbourCopy]:
        """Return the states in memory, without damaged copies; this rank's own ones come last."""
        parts: dict[PartKey, HeldState | NeighbourCopy] = {copy.key: copy for copy in self._copies if copy.is_intact()}
        return parts | {state.key: state for state in (self._shared, self._copy, self._current) if state is not None}

    def replace_newest_states(self, state: HeldState) -> None:
        """Replace this rank's newest states by this one."""
        self._copy, self._current = state, None

    def keep_only_copy(self, copy: NeighbourCopy | None) -> None:
        """Replace all older states by the kept one and by a neighbour's after the same step, if it has one."""
        self._shared, self._copies = (self._copy, (copy,)) if copy else (None, ())


@attrs.define(eq=False)
class PeerMemory:
    """
    States in ranks' memory, `memory` on this rank; copies for neighbours are sent over `copies`, a group of all ranks.

    `sources` are the ranks whose copies ranks keep, by rank; empty without copies. `state_bytes` is the size of this
    rank's state, which is 0 before it is referenced for the first time.
    """

    memory: StateMemory
    mesh: Mesh
    states: Mapping[str, Stateful]
    neighbour_every: Cadence
    copies: Group
    sources: Sequence[int]
    state_bytes: int = internal(0)
    _copy: Future[NeighbourCopy] | None = internal(None)
    _has_logged_copies: bool = internal(False)

    @classmethod
    def choose_neighbours_and_create(
        cls,
        memory: StateMemory | None,
        mesh: Mesh,
        processes: Processes,
        states: Mapping[str, Stateful],
        neighbour_every: Cadence,
    ) -> "PeerMemory":
        """Choose neighbours if there are copies; `memory` comes from a failed attempt. All ranks call this."""
        memory = memory or StateMemory()
        sources = [] if neighbour_every == "never" else _choose_copy_source_by_rank(mesh, processes.node_rank)
        memory.copies_each_step = not sources or mesh.replica_group.size > 1
        copies = processes.make_control_group("neighbours") if sources else mesh.world
        return cls(memory, mesh, states, neighbour_every, copies, sources)

    def close(self) -> None:
        """Wait up to CLOSE_TIMEOUT for a copy in progress."""
        if self._copy is not None:
            wait([self._copy], CLOSE_TIMEOUT)
            self._copy = None

    def reference_and_send(self, step: Step) -> None:
        """Reference the state after a step, and start to send a copy to the neighbour, if it is due."""
        self._wait_and_keep_neighbour_state()  # a skipped update has not waited for it
        self.mesh.world.wait_and_raise_if_broken()
        state = self.memory.reference_states(PartKey.of_this_rank(step.index, self.mesh), self.states)
        self.state_bytes = self.state_bytes or sum(tensor.nbytes for tensor in state.pack().tensors.values())
        if self.sources and not step.is_last and is_due(self.neighbour_every, step):
            self._copy = submit_in_new_thread("neighbour", partial(self._exchange_copies_with_neighbours, state))

    def wait_until_copied(self) -> None:
        """Wait until the state after the last step is copied, here and at the neighbour; it may change from then on."""
        self._wait_and_keep_neighbour_state()
        self.mesh.world.wait_and_raise_if_broken()  # an update must not use gradients of an aborted collective
        self.memory.replace_reference_by_copy()

    def restore(self, newest_on_disk: int) -> int:
        """
        Load the newest state whose parts are all in the remaining ranks' memory, and return its step.

        Ranks without their part receive it from others. Return 0 and load nothing if there is no such state, or if the
        checkpoint on disk, after the step `newest_on_disk`, is newer.
        """
        world = self.mesh.world
        parts = self.memory.list_intact_parts()
        own_keys = {key for key, part in parts.items() if isinstance(part, HeldState)}
        own_key = PartKey.of_this_rank(0, self.mesh)
        offer = [[attrs.asdict(key), key in own_keys] for key in parts]
        gathered = world.gather_json([attrs.asdict(own_key), offer])
        offers = [{PartKey(**key): is_held for key, is_held in offered} for _, offered in gathered]
        sources = find_newest_complete([[*offered] for offered in offers])
        step = next((key.step for key in sources), 0)
        if not step or step < newest_on_disk:
            return 0
        needed = [PartKey(**{**key, "step": step}) for key, _ in gathered]
        own_key = needed[world.rank]
        own = {key: part for key, part in parts.items() if key in sources}
        if all(offered.get(key) for key, offered in zip(needed, offers, strict=True)):
            states = {**_get_own_states(own)}
        else:
            packed = {key: part.pack() for key, part in own.items()}
            states = exchange_and_assemble_states(world, self.states, sources, packed)
            local = {name: state for name, state in _get_own_states(own).items() if is_rank_local(self.states[name])}
            states |= local
            log.info("%s the state after step %d", "sent" if own_key in own_keys else "received", step)
        run_and_gather_on_all_ranks(world, lambda: self._load_states_into_nodes(states))
        kept = HeldState.from_nodes(own_key, self.states, states)
        self.memory.replace_newest_states(kept)  # for another loss in the next step
        copy = self._exchange_copies_with_neighbours(kept) if self.sources else None
        run_and_gather_on_all_ranks(world, lambda: None)  # all ranks have their copies before older ones are dropped
        self.memory.keep_only_copy(copy)
        log.info("restored the state after step %d from memory", step)
        return step

    def drop_all_states(self) -> None:
        """Drop all states, because the run goes back to an older one."""
        self._wait_and_keep_neighbour_state()
        self.memory = StateMemory(self.memory.copies_each_step)

    def _wait_and_keep_neighbour_state(self) -> None:
        """Wait for the copy in progress, if there is one, and keep the other neighbour's state."""
        if self._copy is None:
            return
        start, copy = time.monotonic(), self._copy
        self._copy = None
        self.memory.add_neighbour(copy.result())
        if not self._has_logged_copies:
            self._has_logged_copies = True
            run_log.info("training waited %.2f s for the copy", time.monotonic() - start)

    def _exchange_copies_with_neighbours(self, state: HeldState) -> NeighbourCopy:
        """Send the state to the neighbour, and return the other neighbour's; log the costs of the first copy."""
        start = time.monotonic()
        copy = exchange_copies_with_neighbours(self.copies, self.sources, state)
        if not self._has_logged_copies:
            size = sum(tensor.nbytes for tensor in copy.packed.tensors.values()) / 1e6
            run_log.info(
                "every rank's state is copied to another rank's memory: %.1f MB (twice while it is replaced), and as "
                "much for the own state; %.2f s after every %s steps, while training continues",
                size,
                time.monotonic() - start,
                self.neighbour_every,
            )
        return copy

    def _load_states_into_nodes(self, states: Mapping[str, Any]) -> None:
        """Load states into their nodes. A joining rank keeps its initial random generators."""
        for name, state in states.items():
            self.states[name].load_state_dict(state)


def _choose_copy_source_by_rank(mesh: Mesh, machine: int) -> list[int]:
    """
    Return by rank whose copy it keeps: in its replica, on another machine if possible.

    Empty if replicas have one rank. All ranks call this.
    """
    replica = mesh.model_copy_group
    members = replica.gather_json([machine, mesh.world.rank])
    machines = [number for number, _ in members]
    # Machines may have different numbers of a replica's ranks: the best shift has the most pairs on two machines.
    shift = max(
        range(1, replica.size),
        key=lambda shift: sum(number != machines[rank - shift] for rank, number in enumerate(machines)),
        default=1,
    )
    source = members[(replica.rank - shift) % replica.size][1]
    sources = mesh.world.gather_json(source)
    return sources if replica.size > 1 else []


def _get_own_states(parts: Mapping[PartKey, HeldState | NeighbourCopy]) -> Mapping[str, Any]:
    """Return the states that this rank has held itself; none if all parts are other ranks'."""
    return next((part.states for part in parts.values() if isinstance(part, HeldState)), {})
