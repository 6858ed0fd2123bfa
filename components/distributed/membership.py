"""This process's membership in a generation: its monitor and connections, and how it joins a run as a spare."""

import socket
from typing import Any

import attrs

from drawloom.components.distributed.connections import Connections
from drawloom.components.distributed.generations import CURRENT, Generation, RunProcess
from drawloom.components.distributed.launch_store import connect_to_launch_store
from drawloom.components.distributed.rank_monitor import RankMonitor
from drawloom.components.distributed.spare import wait_as_spare
from drawloom.components.distributed.torchrun import Launch

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
