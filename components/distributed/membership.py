"""
This process's membership in a generation: its monitor and connections, and how it joins a run as a spare.

Members of a generation (`generation.py`) continue after a loss, and agree on new processes. After a loss, all live
ranks break their collectives, unwind, and meet in the launch's store. The first rank that sees every other one as
arrived or lost proposes the next generation's members, and all ranks use the proposal in the store, so that no two
groups exist. Processes that start later, and ranks in incomplete replicas, are spares: they wait in the store. If all
ranks are lost, the spares propose the next generation.
"""

import json
import logging
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import closing
from typing import Any

import attrs
import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from drawloom import UserError, internal
from drawloom.components.distributed.connections import Connections
from drawloom.components.distributed.generation import Generation, RunProcess
from drawloom.components.distributed.launch_store import Failure, connect_to_launch_store
from drawloom.components.distributed.peer_processes import PeerProcesses
from drawloom.components.distributed.preparation import Preparation
from drawloom.components.distributed.rank_monitor import KILL_TIMEOUT, MAX_WATCHED, RankMonitor
from drawloom.components.distributed.torchrun import Launch
from drawloom.graph.cli.terminal import print_escaped_text
from drawloom.graph.problems import ReportedError

log = logging.getLogger("drawloom.distributed")

TICK = 0.02  # seconds between two looks into the store while ranks agree
WAITING_TICK = 0.1  # seconds between a spare's looks into the store
RECOVERY_MARGIN = 5.0  # seconds after the heartbeats' timeout, to publish a loss and to read it
CURRENT = "current_generation"
"""Key in the launch's store: the newest generation of the launch's run."""
RUNS: dict[str, Any] = {}
"""This process's runs by name, equal on all ranks, with the launch's store, kept alive, if the process hosts it."""


@attrs.define
class Spares:
    """
    A run's spares in the launch's store, with numbers from 1.

    Known spares are read once, because rank 0 asks for spares in every step.
    """

    store: Any
    _module_count: int = internal(0)  # in the last announced preparation
    _preparations: int = internal(0)  # announced so far
    _known: dict[int, RunProcess] = internal(factory=dict)
    _settled: set[int] = internal(factory=set)  # admitted, or ended

    def register(self, member: RunProcess) -> int:
        """Add a spare, and return its number."""
        number: int = self.store.add("spares", 1)
        self.store.set(f"spare/{number}", json.dumps(attrs.asdict(member)))
        return number

    def find_waiting_spares(self) -> dict[int, RunProcess]:
        """Return the live spares that were not admitted yet, by number."""
        last: int = self.store.add("spares", 0)
        for number in {*range(1, last + 1)} - self._settled:
            if number not in self._known and self.store.check([f"spare/{number}"]):
                self._known[number] = RunProcess(**json.loads(self.store.get(f"spare/{number}")))
            if number in self._known and (
                self._known[number].has_ended_on_this_machine() or self.store.check([f"admitted/{number}"])
            ):
                self._settled.add(number)
        return {number: self._known[number] for number in sorted(self._known.keys() - self._settled)}

    def find_admission(self, number: int) -> Generation | None:
        """Return the generation that has admitted a spare; None until then."""
        if not self.store.check([f"admitted/{number}"]):
            return None
        return Generation.from_json(self.store.get(f"admitted/{number}"))

    def announce_admission(self, numbers: Iterable[int], generation: Generation) -> None:
        """Tell spares that they are members in this generation; a second call changes nothing."""
        for number in numbers:
            self.store.set(f"admitted/{number}", generation.to_json())

    def announce_preparation(self, modules: Collection[str], state_bytes: int) -> None:
        """Publish a preparation for spares, if this member has imported more modules than before."""
        if len(modules) > self._module_count:
            self._module_count = len(modules)
            self.store.set("preparation", json.dumps(attrs.asdict(Preparation([*modules], state_bytes))))
            self.store.add("preparations", 1)

    def prepare_if_announced(self, gpus: Sequence[torch.device]) -> None:
        """Prepare this process for joining with one of `gpus`, if a member has announced how since the last call."""
        before, self._preparations = self._preparations, self.store.add("preparations", 0)
        if self._preparations > before:
            Preparation(**json.loads(self.store.get("preparation"))).prepare(gpus)

    def announce_run_end(self, exit_code: int) -> None:
        """Tell all spares that the run has ended with this exit code."""
        self.store.set("ended", str(exit_code))

    def find_exit_code(self) -> int | None:
        """Return the run's exit code; None if it has not ended."""
        return int(self.store.get("ended")) if self.store.check(["ended"]) else None


def agree_on_next_generation(
    generation: Generation,
    rank: int,
    store: Any,
    spares: Spares,
    losses: Callable[[], Mapping[int, str]],
    is_over: Callable[[], bool],
) -> Generation | None:
    """
    Return the next generation, equal on all live ranks; None if too few are left for a replica, or if `is_over`.

    `store` is this generation's. `losses` returns the lost ranks, which may grow meanwhile. Raises RuntimeError if the
    store is gone.
    """
    store.set(f"joined/{rank}", b"1")
    everyone = range(len(generation.members))
    while any(other not in losses() and not store.check([f"joined/{other}"]) for other in everyone):
        if is_over():
            return None
        time.sleep(TICK)
    chosen = propose_next_generation(generation, losses().keys(), store, spares)
    return chosen if chosen.members else None


def propose_next_generation(generation: Generation, lost: Set[int], store: Any, spares: Spares) -> Generation:
    """Propose a next generation in this generation's store, unless there is one; return it and tell its spares."""
    following = generation.choose_next_generation(lost, spares.find_waiting_spares().values())
    chosen = Generation.from_json(store.compare_set("following", "", following.to_json()))
    # every process does this, because the one that has proposed may be lost meanwhile
    spares.announce_admission(
        [number for number, spare in spares.find_waiting_spares().items() if spare in chosen.members], chosen
    )
    return chosen


def wait_as_spare(
    store: Any, run: str, own: RunProcess, silence: float, gpus: Sequence[torch.device] = ()
) -> Generation:
    """
    Wait in the launch's store until a generation of the run admits this process, and return it.

    Meanwhile prepare for joining with one of `gpus`. If all members are lost, the spares form a generation themselves.
    Members also count as lost if they send no heartbeat for `silence` seconds. Raises ReportedError when the run ends,
    and UserError if the spares stay too few.
    """
    spares = Spares(PrefixStore(run, store))
    spares.prepare_if_announced(gpus)
    number = spares.register(own)
    log.info("this process waits as spare %d", number)
    with closing(MemberWatch(store, silence)) as members:
        while (generation := spares.find_admission(number)) is None:
            are_lost = members.look_and_check_if_lost()  # first, because members announce the run's end before theirs
            exit_code = spares.find_exit_code()
            if exit_code is None and are_lost:
                exit_code = members.find_exit_code()
            if exit_code is not None:
                raise ReportedError("the run has ended while this process waited as a spare", exit_code)
            if are_lost and not members.replace_if_spares_suffice(spares) and members.is_silent:
                raise UserError(
                    "all processes of the run are lost, and the waiting ones are too few for its mesh; start it again"
                )
            spares.prepare_if_announced(gpus)
            time.sleep(WAITING_TICK)
        members.end_lost_processes()
    return generation


def read_and_count_heartbeats(store: Any) -> tuple[Generation, int]:
    """Return the launch's newest generation, and the heartbeats of its first ranks so far."""
    generation = Generation.from_json(store.get(CURRENT))
    beats = generation.get_store(store)
    watched = range(min(MAX_WATCHED, len(generation.members)))  # some of them may be lost
    return generation, sum(beats.add(f"beat/{rank}", 0) for rank in watched)


@attrs.define
class MemberWatch:
    """Watch on the members of the launch's newest generation: their processes on this machine, and heartbeats."""

    store: Any
    timeout: float
    _generation: Generation | None = internal(None)
    _beats: int = internal(0)
    _since: float = internal(0.0)
    _processes: PeerProcesses = internal(factory=PeerProcesses)

    def look_and_check_if_lost(self) -> bool:
        """Return whether all members have ended on this machine, or none has sent a heartbeat for `timeout` seconds."""
        generation, beats = read_and_count_heartbeats(self.store)
        if generation != self._generation:
            self.close()
            self._processes = PeerProcesses(generation.find_local_pids())
            self._processes.open()
        if (generation, beats) != (self._generation, self._beats):
            self._generation, self._beats, self._since = generation, beats, time.monotonic()
        return len(self._processes.find_ended()) == len(generation.members) or self.is_silent

    @property
    def is_silent(self) -> bool:
        """Whether there was no heartbeat for `timeout` seconds."""
        return time.monotonic() >= self._since + self.timeout

    def find_exit_code(self) -> int | None:
        """Return the exit code of members that have failed or ended normally; None if they were lost before."""
        assert self._generation is not None
        store = self._generation.get_store(self.store)
        if store.check(["failure"]):
            return Failure(**json.loads(store.get("failure"))).exit_code
        return 0 if any(store.check([f"exiting/{rank}"]) for rank in range(len(self._generation.members))) else None

    def replace_if_spares_suffice(self, spares: Spares) -> bool:
        """Kill the lost members, and let spares form the next generation; return whether they are enough."""
        lost = self._generation
        assert lost is not None
        store, ranks = lost.get_store(self.store), {*range(len(lost.members))}
        if not lost.choose_next_generation(ranks, spares.find_waiting_spares().values()).members and not store.check(
            ["following"]  # lost before all of them knew it
        ):
            return False
        for rank in ranks:  # a member that was suspended, perhaps on another machine, ends itself
            store.compare_set(f"lost/{rank}", "", "is lost with all others")
        store.set("broken", b"1")
        self._processes.kill(ranks)
        following = propose_next_generation(lost, ranks, store, spares)
        # unless other spares are ahead; the same text as theirs
        self.store.compare_set(CURRENT, lost.to_json(), following.to_json())
        if following.members[:1] == [RunProcess.of_this_process()]:
            text = f"all processes are gone; {lost.describe_membership_change_to(following)}"
            log.warning("%s", text)
            print_escaped_text(text, "stderr")
        return bool(following.members)

    def end_lost_processes(self) -> None:
        """Kill lost members on this machine, such as stopped ones, and wait for their end, which frees their GPUs."""
        if self._generation is not None:
            store = self._generation.get_store(self.store)
            lost = [rank for rank in self._processes.pids if store.check([f"lost/{rank}"])]
            self._processes.kill(lost)
            self._processes.wait_until_ended(lost, KILL_TIMEOUT)

    def close(self) -> None:
        """Stop watching."""
        self._processes.close()


@attrs.frozen
class Membership:
    """
    A generation, and this process's monitor and connections in it, which exist before its groups.

    `control` is a connection to the launch's store. There are few of them, because the store looks up a name for every
    new one.
    """

    generation: Generation
    monitor: RankMonitor
    connections: Connections
    control: Any = None


def start_membership(
    launch: Launch,
    generation: Generation,
    connections: Connections,
    timeout: float,
    heartbeat_timeout: float | None = None,
) -> Membership:
    """
    Start a monitor for a generation with this process.

    With `heartbeat_timeout`, the run survives losses: a loss breaks the connections. Both timeouts are in seconds.
    """
    rank, peers = generation.members.index(RunProcess.of_this_process()), generation.find_local_pids()
    del peers[rank]
    monitor = RankMonitor(
        rank,
        len(generation.members),
        connect_to_launch_store(launch.address, launch.port, generation.name, timeout),
        peers,
        error_file=launch.error_file,
        where=f", on host {launch.node_rank}, {socket.gethostname()}" if launch.node_count > 1 else "",
    )
    if heartbeat_timeout is not None:
        monitor.on_loss = connections.break_all_connections
        monitor.heartbeat_timeout = heartbeat_timeout
    monitor.start()
    return Membership(generation, monitor, connections)


def wait_to_join_running_generation(
    launch: Launch, timeout: float, heartbeat_timeout: float, gpus: Sequence[torch.device], *, is_member: bool
) -> Membership | None:
    """
    Wait as a spare until a generation admits this process, with one of `gpus`.

    Return None if the launch has no run yet. `is_member` is True for a former member of the run. Raises ReportedError
    when the run ends, and UserError if its processes are gone.
    """
    hosts_store = launch.rank == 0 and not launch.agent_store  # it starts with the process group
    if not launch.address or (hosts_store and not is_member):
        return None
    store = connect_to_launch_store(launch.address, launch.port, launch.attempt, timeout)
    if not store.check([CURRENT]):
        return None
    generation = Generation.from_json(store.get(CURRENT))
    if generation.run in RUNS and not is_member:
        return None
    own = RunProcess.from_launch(launch, is_member=is_member)
    outcome = wait_as_spare(store, generation.run, own, heartbeat_timeout + RECOVERY_MARGIN, gpus)
    membership = start_membership(launch, outcome, Connections(launch.port), timeout, heartbeat_timeout)
    return attrs.evolve(membership, control=store)
