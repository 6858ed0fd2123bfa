"""The dimension of replicas, which have the same parameters and other rows; `ddp.py` sums their gradients."""

from collections.abc import Set
from typing import ClassVar

import attrs

from drawloom.components.parallel.dimension import Dimension, RankParameters


@attrs.define(eq=False)
class DataReplicateDimension(Dimension):
    """Ranks with the same parameters and other rows (DDP); with shards, HSDP."""

    name: ClassVar[str] = "data_replicate"

    def list_copies_owned_elsewhere(self, parameters: RankParameters) -> Set[str]:
        """
        If one copy of the experts spans several replicas, return the dense parameters on all but the first of these.
        """
        # Several replicas together have one copy of the experts if `expert` is larger than a replica.
        replicas_per_copy = self.mesh.sizes.data_replicate // self.mesh.replica_group.size
        if self.mesh.indices.data_replicate % replicas_per_copy:
            return parameters.trained.keys() - parameters.experts
        return frozenset()

    def sum_remaining_gradients(self, parameters: RankParameters) -> None:
        """Sum dense parameters' gradients over all ranks with other tokens: replicas, shards and contexts."""
        unsummed = [name for name in parameters.trained if name not in parameters.summed | parameters.experts]
        parameters.sum_named_gradients_over_group(unsummed, self.mesh.data_group)
