"""
Seconds in a recovery by function, for `ettr.py`, until the end of a process's first step.

A listener, so that a recipe imports it; the import wraps the functions. A process writes a line at the end of its first
step after every opening.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any, ClassVar

from drawloom import component
from drawloom.components.checkpoint import memory_exchange, peer_memory
from drawloom.components.distributed import launched_ranks
from drawloom.components.distributed.connections import Connections
from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.group_factory import GroupFactory
from drawloom.components.distributed.rank_monitor import RankMonitor
from drawloom.components.phases.forward_backward import ForwardBackward
from drawloom.graph.cli.commands.training import run
from drawloom.graph.runtime.container import Container
from drawloom.graph.runtime.opened import OpenedNodes
from drawloom.ports import Event, EventKind

MIN_SECONDS_SHOWN = 0.02
ROLE, START, OPENED = "role", "start", "until the first step"
FUNCTIONS: list[tuple[Any, str]] = [
    (launched_ranks.LaunchedRanks, "_agree_on_next_generation"),
    (RankMonitor, "wait_until_lost_processes_end"),
    (Connections, "wait_until_aborted"),
    (GroupFactory, "close"),
    (run, "free_closed_graphs"),
    (Container, "build"),
    (ComputeDevice, "make_current"),
    (launched_ranks.LaunchedRanks, "_connect_stores"),
    (GroupFactory, "join"),
    (GroupFactory, "make_group"),
    (GroupFactory, "make_control_group"),
    (peer_memory.PeerMemory, "restore"),
    (memory_exchange, "_allocate_requested"),
    (memory_exchange, "exchange_tensors"),
    (peer_memory.PeerMemory, "_load_states_into_nodes"),
    (ForwardBackward, "run_phase"),
    (peer_memory.StateMemory, "replace_reference_by_copy"),
]
seconds: dict[str, Any] = {ROLE: "start", START: time.monotonic()}
"""Seconds by function since the last opening began, and the process's role in it."""


def _add(name: str, start: float) -> None:
    seconds[name] = seconds.get(name, 0.0) + time.monotonic() - start


def _wrap(owner: Any, name: str) -> None:
    function = getattr(owner, name)

    @wraps(function)
    def timed(*arguments: Any, **named: Any) -> Any:
        start = time.monotonic()
        try:
            return function(*arguments, **named)
        finally:
            _add(name.lstrip("_"), start)

    setattr(owner, name, timed)


def _note_role(method: Callable[..., Any], ranks: Any, membership: Any) -> Any:
    """Note that this process joins the generation after the first one, as a spare or as a survivor."""
    if seconds[ROLE] == "start":
        seconds.clear()
        seconds.update({ROLE: "spare", START: time.monotonic()})
    return method(ranks, membership)


def _begin_survivor(method: Callable[..., Any], ranks: Any) -> Any:
    """Forget the times of this process's last opening: another one begins."""
    seconds.clear()
    seconds.update({ROLE: "survivor", START: time.monotonic()})
    return method(ranks)


def _time_open(method: Callable[..., Any], nodes: Any, name: str, item: Any) -> None:
    start = time.monotonic()
    try:
        method(nodes, name, item)
    finally:
        if name != "processes" or seconds[ROLE] == "survivor":  # otherwise it has waited
            _add(f"open [{name}]", start)


def _bind(function: Callable[..., Any], method: Callable[..., Any]) -> Any:
    bound = partial(function, method)
    return lambda *arguments: bound(*arguments)


for owner, function_name in FUNCTIONS:
    _wrap(owner, function_name)
RANKS = launched_ranks.LaunchedRanks
RANKS._join_generation_groups = _bind(_note_role, RANKS._join_generation_groups)  # type: ignore[method-assign]
RANKS._agree_on_next_generation = _bind(_begin_survivor, RANKS._agree_on_next_generation)  # type: ignore[method-assign]
OpenedNodes._open_node = _bind(_time_open, OpenedNodes._open_node)  # type: ignore[method-assign]


@component(impact="safe")
class RecoveryTimings:
    """Listener that writes a line of seconds at the end of the first step after an opening."""

    observes: ClassVar[tuple[EventKind, ...]] = ("step_started", "step_ended")

    def on_event(self, event: Event) -> None:
        """Note the first step's start, and write a line at its end."""
        if seconds[ROLE] == "start" or START not in seconds:
            return
        if event.kind == "step_started" and OPENED not in seconds:
            seconds[OPENED] = time.monotonic() - seconds[START]
            seconds.pop("run_phase", None)
        elif event.kind == "step_ended" and OPENED in seconds:
            seconds["first step"] = time.monotonic() - seconds.pop(START) - seconds[OPENED]
            with Path(f"timings-{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps(seconds) + "\n")


def format_median_timings(folder: Path) -> str:
    """Return the median seconds by function for survivors and for spares, from the lines in a folder."""
    lines = [json.loads(line) for path in folder.glob("timings-*.jsonl") for line in path.read_text().splitlines()]
    by_role = {role: [line for line in lines if line[ROLE] == role] for role in ("survivor", "spare")}
    return "\n".join(_format_role(role, listed) for role, listed in by_role.items() if listed)


def _format_role(role: str, lines: Sequence[dict[str, Any]]) -> str:
    names = {name for line in lines for name in line} - {ROLE}
    medians = {name: statistics.median(line.get(name, 0.0) for line in lines) for name in names}
    shown = sorted(((value, name) for name, value in medians.items() if value >= MIN_SECONDS_SHOWN), reverse=True)
    return f"  {role}, {len(lines)} times: " + ", ".join(f"{name} {value:.2f}" for value, name in shown)
