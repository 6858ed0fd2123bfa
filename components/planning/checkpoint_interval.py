"""
Checkpoint interval for machines that fail.

A save costs some seconds, and a failure costs all steps since the last save. Young, "A first order approximation to
the optimum checkpoint interval", CACM 17(9), 1974: the sum is minimal if saves are sqrt(2 * cost * time between
failures) apart. Daly, FGCS 22(3), 2006, gives higher orders, which differ if a save costs more than a hundredth of the
time between failures.
"""

import math

import attrs

from drawloom.components.planning.nodes import Nodes
from drawloom.components.planning.plan import Plan
from drawloom.graph.cli.command import output, output_class
from drawloom.ports import Restorer, Stager

COPY_BANDWIDTH, WRITE_BANDWIDTH = 10e9, 2e9
"""Assumed bytes/s of a rank's copy to host memory, and of a host's writes to storage."""

SAVED_KINDS = ("parameters", "masters", "optimizer_state")


@output_class
class CheckpointInterval:
    """Proposed checkpoint interval."""

    node: str = output("node of the checkpointer")
    every: int = output("steps between saves")
    cost: float = output("seconds of a save")
    between_failures: float = output("mean seconds between failures")
    step: float = output("seconds of a step")
    toml: str = output(
        "setting as a line of TOML",
        default=attrs.Factory(lambda self: f"{self.node}.every = {self.every}", takes_self=True),
    )
    lost: float = output(
        "fraction of time lost to saves and repeated steps",
        default=attrs.Factory(
            lambda self: self.cost / (self.every * self.step) + self.every * self.step / 2 / self.between_failures,
            takes_self=True,
        ),
    )

    def __str__(self) -> str:
        hours = f"{float(f'{self.between_failures / 3600:.3g}'):,g}"  # 1,000 and not 1e+03
        why = f"a save costs {self.cost:.3g} s, and a failure is expected every {hours} h"
        return f"{self.toml}  # {why}; saves and lost steps take {self.lost:.2%} of the time"


def propose_checkpoint_interval(
    nodes: Nodes, planned: Plan, host_mtbf_seconds: float, save_seconds: float | None = None
) -> CheckpointInterval:
    """Propose an interval, given a host's mean time between failures; `save_seconds` are estimated if None."""
    hosts = math.ceil(planned.ranks / planned.device.per_host)
    between = host_mtbf_seconds / hosts
    if save_seconds is None:
        save_seconds = estimate_blocking_save_seconds(nodes, planned)
    every = max(1, round(math.sqrt(2 * save_seconds * between) / planned.time.seconds))
    return CheckpointInterval(nodes.find_only_node(Restorer), every, save_seconds, between, planned.time.seconds)


def estimate_blocking_save_seconds(nodes: Nodes, planned: Plan) -> float:
    """
    Estimate how many seconds a save blocks the run: until its state is copied, or written if there is no staging.

    With `checkpoint.staging.overlapped` copies overlap passes, so that the estimate is an upper bound.
    """
    sizes = [sum(memory.persistent.get(kind, 0) for kind in SAVED_KINDS) for memory in planned.memory]
    if nodes.find_nodes(Stager):
        return max(sizes) / COPY_BANDWIDTH
    # The state of replicas is written once.
    whole = sum(sizes) * planned.ranks // len(sizes) // planned.mesh.replica_group.size
    return whole / (WRITE_BANDWIDTH * math.ceil(planned.ranks / planned.device.per_host))
