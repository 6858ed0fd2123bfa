"""This process's membership in a generation: its monitor and connections, and how it joins a run as a spare."""

import gc
import json
import logging
import socket
import time
from contextlib import closing
from typing import Any

import attrs
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from drawloom import UserError
from drawloom.components.distributed.connections import Connections
from drawloom.components.distributed.generations import CURRENT, Generation, RunProcess, Spares, propose_next_generation
from drawloom.components.distributed.launch_store import Failure, connect_to_launch_store
from drawloom.components.distributed.peer_processes import PeerProcesses
from drawloom.components.distributed.rank_monitor import MAX_WATCHED, RankMonitor
from drawloom.components.distributed.torchrun import Launch
from drawloom.graph.cli.terminal import print_escaped_text
from drawloom.graph.problems import ReportedError

log = logging.getLogger("drawloom.distributed")

WAITING_TICK = 0.1  # seconds between two looks into the store


def wait_as_spare(store: Any, run: str, silence: float) -> Generation:
    """
    Wait in the launch's store until a generation of the run admits this process, and return it.

    If all members are lost, the spares form a generation themselves. Members also count as lost if they send no
    heartbeat for `silence` seconds. Raises ReportedError when the run ends, and UserError if the spares stay too few.
    """
    import_early_and_freeze_gc()
    spares = Spares(PrefixStore(run, store))
    number = spares.register(RunProcess.of_this_process())
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
            time.sleep(WAITING_TICK)
    return generation


def import_early_and_freeze_gc() -> None:
    """
    Import modules that a recovery would import, and hide all objects so far from the garbage collector.

    torch imports `torch._dynamo` with the first optimizer, which takes a second or more. A recovery's collections would
    walk through its million objects.
    """
    import torch._dynamo  # noqa: F401

    gc.freeze()


def read_and_count_heartbeats(store: Any) -> tuple[Generation, int]:
    """Return the launch's newest generation, and the heartbeats of its first ranks so far."""
    generation = Generation.from_json(store.get(CURRENT).decode())
    beats = generation.get_store(store)
    watched = range(min(MAX_WATCHED, len(generation.members)))  # some of them may be lost
    return generation, sum(beats.add(f"beat/{rank}", 0) for rank in watched)


@attrs.define
class MemberWatch:
    """Watch on the members of the launch's newest generation: their processes on this machine, and heartbeats."""

    store: Any
    timeout: float
    _generation: Generation | None = attrs.field(init=False, default=None)
    _beats: int = attrs.field(init=False, default=0)
    _since: float = attrs.field(init=False, default=0.0)
    _processes: PeerProcesses = attrs.field(init=False, factory=PeerProcesses)

    def look_and_check_if_lost(self) -> bool:
        """Return whether all members have ended on this machine, or none has sent a heartbeat for `timeout` seconds."""
        generation, beats = read_and_count_heartbeats(self.store)
        if generation != self._generation:
            self.close()
            machine = RunProcess.of_this_process().machine
            local = {rank: member.pid for rank, member in enumerate(generation.members) if member.machine == machine}
            self._processes = PeerProcesses(local)
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

    def close(self) -> None:
        """Stop watching."""
        self._processes.close()


RECOVERY_MARGIN = 5.0  # seconds after the heartbeats' timeout, to publish a loss and to read it
RUNS: dict[str, Any] = {}
"""This process's runs by name, equal on all ranks, with the launch's store, kept alive, if the process hosts it."""


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
    own = RunProcess.of_this_process()
    rank = generation.members.index(own)
    peers = {
        number: member.pid
        for number, member in enumerate(generation.members)
        if member.machine == own.machine and number != rank
    }
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
    launch: Launch, timeout: float, heartbeat_timeout: float, *, is_member: bool
) -> Membership | None:
    """
    Wait as a spare until a generation admits this process.

    Return None if the launch has no run yet. `is_member` is True for a former member of the run. Raises ReportedError
    when the run ends, and UserError if its processes are gone.
    """
    hosts_store = launch.rank == 0 and not launch.agent_store  # it starts with the process group
    if not launch.address or (hosts_store and not is_member):
        return None
    store = connect_to_launch_store(launch.address, launch.port, launch.attempt, timeout)
    if not store.check([CURRENT]):
        return None
    generation = Generation.from_json(store.get(CURRENT).decode())
    if generation.run in RUNS and not is_member:
        return None
    outcome = wait_as_spare(store, generation.run, heartbeat_timeout + RECOVERY_MARGIN)
    membership = start_membership(launch, outcome, Connections(launch.port), timeout, heartbeat_timeout)
    return attrs.evolve(membership, control=store)
