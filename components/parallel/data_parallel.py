"""
Data parallelism for a stage's parameters: sharded (FSDP, ZeRO-3), replicated (DDP), both (HSDP), or on one rank.

Only the module for the mesh in use is imported.
"""

from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any

import attrs
from torch import nn

from drawloom.components.distributed.mesh_layout import SHARDS
from drawloom.components.parallel.master_weights import Blocks, ParameterStore
from drawloom.ports import Mesh, Precision

if TYPE_CHECKING:
    from drawloom.components.parallel.fsdp import ShardedModule, ShardedStore


@attrs.frozen(kw_only=True, eq=False)
class DataParallel:
    """
    Factory for parameter stores of this rank's stages.

    `blocks` returns a module's blocks; with `gathers_per_block`, FSDP gathers them one by one. With
    `reduces_per_microbatch`, gradients are reduced after every microbatch. Replicas start to sum gradients
    during the backward pass, in buckets with `bucket_bytes`. `experts` are the names of parameters split over expert
    ranks.
    """

    mesh: Mesh
    precision: Precision
    blocks: Blocks
    gathers_per_block: bool
    reduces_per_microbatch: bool
    bucket_bytes: int
    experts: Set[str]

    @property
    def _shards_experts(self) -> bool:
        """Whether FSDP shards experts: several ranks in one model copy have the same experts."""
        return bool(self.experts) and self.mesh.sizes.expert_shard > 1

    def _get_torch_mesh(self, replicas: str, *shards: str) -> Any:
        """
        Return torch's mesh with the ranks along `shards`, after a first dimension for replicas if there are several.
        """
        outer = [(replicas,)] if self.mesh.group(replicas).size > 1 else []
        return self.mesh.create_torch_mesh(*outer, shards)

    def shard_modules(self, modules: Iterable[nn.Module]) -> "list[ShardedModule]":
        """Shard the parameters of meta modules; return an empty list without sharding."""
        if self.mesh.shard_group.size == 1:
            return []
        from drawloom.components.parallel.fsdp import shard_with_fsdp

        expert_mesh = self._get_torch_mesh("expert_replicate", "expert_shard") if self._shards_experts else None
        return shard_with_fsdp(
            modules,
            self.blocks,
            self._get_torch_mesh("data_replicate", *SHARDS),
            self.precision,
            gathers_per_block=self.gathers_per_block,
            reduces_per_microbatch=self.reduces_per_microbatch,
            experts=self.experts,
            expert_mesh=expert_mesh,
        )

    def create_store(
        self, modules: Sequence[nn.Module], sharded: "Sequence[ShardedModule]"
    ) -> "ParameterStore | ShardedStore":
        """Return the parameter store for modules with memory and values."""
        if sharded:
            from drawloom.components.parallel.fsdp import ShardedStore

            return ShardedStore.from_modules(sharded, self.precision)
        replicas = self.mesh.data_group
        if replicas.size == 1:
            return ParameterStore.from_modules(modules, self.precision)
        from drawloom.components.parallel.ddp import ReplicatedStore

        has_same_replicas = not self.experts or self.mesh.expert_data_group.size == replicas.size
        return ReplicatedStore.from_replicated_modules(
            modules,
            self.blocks,
            self.precision,
            replicas,
            self.bucket_bytes,
            frozenset() if has_same_replicas else self.experts,
        )

    def create_planned_store(self, modules: Sequence[nn.Module]) -> ParameterStore:
        """Return the parameter store for modules on the meta device, for a plan."""
        if (ranks := self.mesh.shard_group).size == 1:
            return ParameterStore.from_modules(modules, self.precision)
        from drawloom.components.parallel.fsdp import SlicedStore

        return SlicedStore.from_sliced_modules(
            modules,
            self.blocks,
            ranks,
            self.precision,
            self.gathers_per_block,
            experts=self.experts,
            expert_ranks=self.mesh.sizes.expert_shard if self._shards_experts else 1,
        )
