"""Comparison of parameters between replicas, to find silent data corruption before a checkpoint saves it."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from drawloom import UserError, component, setting
from drawloom.components.storage.tensor_source import view_bytes
from drawloom.ports import Cadence, Mesh, Parameters, Step, describe_cadence_fault, is_due

MAX_NAMES_SHOWN = 5


@component(reads=("weights",), impact="safe")
class CompareReplicas:
    """
    Comparison of all parameters' bits between the replicas (DDP) at some steps; a difference ends the run.

    Replicas apply the same updates to the same parameters, so a difference is corruption by a device, its memory or a
    network, or a fault in the software. With three or more replicas the odd one is named. Shards of a replica (FSDP)
    are compared with the same shards of the other replicas. Every comparison copies the parameters to the CPU.
    """

    mesh: Mesh
    parameters: Parameters
    every: Cadence = setting(
        'steps between comparisons, or "last" or "never"', default=100, check=describe_cadence_fault
    )

    def run_phase(self, step: Step) -> None:
        """Compare one digest of all parameters, and each parameter's digest after a difference. Raises UserError."""
        replicas = self.mesh.replica_group
        if replicas.size == 1 or not is_due(self.every, step):
            return
        parameters = self.parameters.named_parameters()
        digests = {name: hashlib.sha256(view_bytes(parameter)).hexdigest() for name, parameter in parameters}
        total = hashlib.sha256("".join(digests.values()).encode()).hexdigest()
        if len({*replicas.gather_json(total)}) > 1:
            by_replica = replicas.gather_json({"rank": self.mesh.world.rank, "digests": digests})
            raise UserError(f"after the update of step {step.index}, {describe_differing_replicas(by_replica)}")


def describe_differing_replicas(digests_by_replica: Sequence[dict[str, Any]]) -> str:
    """Return a message with the differing parameters and, if a majority agrees, the ranks outside it."""
    names = [
        name
        for name in digests_by_replica[0]["digests"]
        if len({replica["digests"][name] for replica in digests_by_replica}) > 1
    ]
    counts = Counter(replica["digests"][names[0]] for replica in digests_by_replica)
    digest, votes = counts.most_common(1)[0]
    odd = [replica["rank"] for replica in digests_by_replica if replica["digests"][names[0]] != digest]
    shown = ", ".join(names[:MAX_NAMES_SHOWN]) + (
        f" and {len(names) - MAX_NAMES_SHOWN} more" * (len(names) > MAX_NAMES_SHOWN)
    )
    if 2 * votes > len(digests_by_replica):
        who = f"rank {', '.join(map(str, odd))} has other bits than the other replicas"
    else:
        ranks = ", ".join(str(replica["rank"]) for replica in digests_by_replica)
        who = f"the replicas of ranks {ranks} have different bits"
    return (
        f"{who} in {shown}: silent data corruption, or a fault in the software; the next start resumes from the newest "
        "checkpoint, so check that machine first"
    )
