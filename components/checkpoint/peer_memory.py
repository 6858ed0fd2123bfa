"""
States in ranks' memory: copies at neighbours during a run, and restoring after a loss.

A step's state is referenced at its end, when all ranks have ended it, and copied just before the next update changes
it. So replicas have one step in common at any time, and ranks that have just joined receive the state from a replica.

Without a replica, a lost rank's part is in its neighbour's memory, with all other parts of the same step (GEMINI, SOSP
2023). A copy is sent while the next step computes its gradients, when weights and optimizer state are constant;
training waits for it only before the next update. New copies replace older ones only after all ranks have them.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import attrs
from torch import Tensor

from drawloom import internal
from drawloom.components.checkpoint.memory_exchange import (
    HeldState,
    NeighbourCopy,
    PartKey,
    exchange_and_assemble_states,
    exchange_copies_with_neighbours,
    find_newest_complete,
)
from drawloom.components.checkpoint.snapshot import is_rank_local
from drawloom.components.checkpoint.staging.blocking import Blocking
from drawloom.components.distributed.rank_errors import run_and_gather_on_all_ranks
from drawloom.components.distributed.threads import submit_in_new_thread
from drawloom.components.state.trees import map_leaves
from drawloom.ports import Cadence, Group, Mesh, Processes, Stateful, Step, is_due, run_log

CLOSE_TIMEOUT = 20.0  # seconds

log = logging.getLogger("drawloom.checkpoint")


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
