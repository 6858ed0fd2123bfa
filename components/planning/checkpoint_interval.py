"""
How often to save a checkpoint, if nodes fail now and then.

A save costs the run some seconds, and a failure all steps since the last save. Young, "A first order approximation to
the optimum checkpoint interval", CACM 17(9), 1974: the sum is least where a save follows another after sqrt(2 * cost *
time between failures). Daly, FGCS 22(3), 2006, has the next orders, which differ where a save costs more than a
hundredth of the time between failures.
"""

import math

import attrs

from drawloom.components.planning.nodes import Nodes
from drawloom.components.planning.plan import Plan
from drawloom.components.ports.staging import Stager

COPIED, WRITTEN = 10e9, 2e9
"""Bytes/s assumed of a rank's copies to its host's memory, and of a host's writes to the storage."""

SAVED = ("parameters", "masters", "optimizer_state")


@attrs.frozen
class Interval:
    """
    A proposal: the checkpointer's node, steps between saves, seconds that a save costs and seconds between failures.

    `step` are the seconds of a step.
    """

    node: str
    every: int
    cost: float
    between_failures: float
    step: float

    @property
    def toml(self) -> str:
        """The setting as a line of TOML."""
        return f"{self.node}.every = {self.every}"

    @property
    def lost(self) -> float:
        """The part of the time that goes into saves, and into steps that are done again; starts are not known."""
        interval = self.every * self.step
        return self.cost / interval + interval / 2 / self.between_failures

    def __str__(self) -> str:
        hours = f"{float(f'{self.between_failures / 3600:.3g}'):,g}"  # 1,000 and not 1e+03
        why = f"a save costs {self.cost:.3g} s, and a failure is expected every {hours} h"
        return f"{self.toml}  # {why}; saves and lost steps take {self.lost:.2%} of the time"


def interval(nodes: Nodes, planned: Plan, mtbf: float, cost: float | None = None) -> Interval:
    """The proposal for nodes that fail every `mtbf` seconds each, with seconds that a save costs or an estimate."""
    hosts = math.ceil(planned.ranks / planned.device.per_host)
    between, cost = mtbf / hosts, save_seconds(nodes, planned) if cost is None else cost
    every = max(1, round(math.sqrt(2 * cost * between) / planned.time.seconds))
    return Interval(nodes.checkpointer, every, cost, between, planned.time.seconds)


def save_seconds(nodes: Nodes, planned: Plan) -> float:
    """
    For how long a save is expected to keep the run waiting: until its state is copied, or written without staging.

    With `checkpoint.staging.overlapped`, copies run beside passes, so that this is more than they cost.
    """
    sizes = [sum(memory.kept.get(kind, 0) for kind in SAVED) for memory in planned.memory]
    if nodes.has(Stager):
        return max(sizes) / COPIED
    # Replicas hold the same state, which is written once.
    whole = sum(sizes) * planned.ranks // len(sizes) // planned.mesh.replicas.size
    return whole / (WRITTEN * math.ceil(planned.ranks / planned.device.per_host))
