"""The device mesh: a run's ranks, arranged in named dimensions."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Literal

import torch

from drawloom import NodeView, Problem, between, component, internal, setting
from drawloom.components.distributed.mesh_layout import (
    DATA,
    EXPERT_DATA,
    MODEL,
    SHARDS,
    Layout,
    MeshView,
    describe_expert_fault_and_remedy,
)
from drawloom.ports import DIMENSIONS, Group, P2PChannel, Processes

MAX_RANKS = 2**20  # several times the GPUs of the largest clusters; checks and plans go through all ranks

MAX_PIPELINE = 1024  # ten times the deepest known pipelines; a program has an action for each rank and microbatch

RANKS = between(1, MAX_RANKS + 1)


def _describe_ranks_fault(value: Any) -> str | None:
    """Return a fault for a value other than "auto" or a valid rank count, else None."""
    return None if value == "auto" else RANKS(value)


@component(impact="safe")
class RankMesh(MeshView):
    """All processes as a five-dimensional grid; the sizes' product is the world size."""

    processes: Processes
    pipeline: int = setting(
        "pipeline parallel: ranks that partition the layers", default=1, check=between(1, MAX_PIPELINE + 1)
    )
    data_replicate: int | Literal["auto"] = setting(
        "data parallel (DDP): ranks with the same parameters; auto: all remaining ranks",
        default="auto",
        check=_describe_ranks_fault,
    )
    data_shard: int | Literal["auto"] = setting(
        "FSDP (ZeRO-3): ranks with a shard of every parameter; auto: all remaining ranks, without replicas",
        default=1,
        check=_describe_ranks_fault,
    )
    context: int = setting("context parallel: ranks that split every sequence", default=1, check=RANKS)
    tensor: int = setting("tensor parallel: ranks that share every matrix product", default=1, check=RANKS)
    expert: int = setting(
        "expert parallel: ranks that partition a layer's experts; must divide data_replicate × data_shard × "
        "context × tensor",
        default=1,
        check=RANKS,
    )

    layout: Layout = internal(factory=lambda: Layout(dict.fromkeys(DIMENSIONS, 1)))
    _groups: dict[tuple[str, ...], Group] = internal(factory=dict)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Yield problems in the settings for any process count: too many ranks, or an impossible `expert`."""
        sizes = {name: size for name in DIMENSIONS if isinstance(size := node.settings[name], int)}
        if (ranks := prod(sizes.values())) > MAX_RANKS:
            widest = max(sizes, key=lambda name: sizes[name])
            yield node.problem(widest, f"the mesh has {ranks} ranks, which is more than {MAX_RANKS}", "write less")
        elif fault := describe_expert_fault_and_remedy(node.settings, node.settings["expert"]):
            text, hint = fault
            yield node.problem("expert", text, hint)
        processes = node.neighbour("processes")
        if node.settings["data_shard"] == "auto" and processes and processes.settings.get("on_failure") == "continue":
            text = "a run that survives losses needs the number of shards in a complete replica"
            yield node.problem("data_shard", text, "write it instead of auto")

    def open(self) -> None:
        """Make the process groups. Raises UserError, before any communication, if the world size does not fit."""
        from drawloom.components.distributed.mesh_sizes import resolve_layout  # a check knows no processes

        settings = {name: getattr(self, name) for name in (*DIMENSIONS, "expert")}
        if self.processes.generation:
            settings["data_replicate"] = "auto"
            settings["data_shard"] = self.processes.remaining_shards or self.data_shard
        expert = settings.pop("expert")
        self.layout = resolve_layout(settings, expert, self.processes.world_size)
        # every rank makes the same groups in the same order, as torch.distributed requires
        expert_groups = (("expert",), ("expert_shard",), ("expert_replicate",), EXPERT_DATA) if expert > 1 else ()
        single = [(name,) for name in DIMENSIONS if name != "data_shard"]  # FSDP shards over `context`, too: SHARDS
        for names in (DIMENSIONS, *single, SHARDS, DATA, MODEL, *expert_groups):
            self.group(*names)
        shards = self.layout.sizes["data_shard"] if self.data_shard == "auto" else self.data_shard
        self.processes.set_replica_shape(self.pipeline, shards, self.context * self.tensor, expert)

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""
        return self.processes.rank

    def group(self, *dimensions: str) -> Group:
        if dimensions not in self._groups:
            name = "world" if dimensions == DIMENSIONS else " × ".join(dimensions)
            self._groups[dimensions] = self.processes.make_group(name, self.layout.list_rank_sets(*dimensions))
        return self._groups[dimensions]

    def create_torch_mesh(self, *dimensions: Sequence[str]) -> Any:
        # imported here, because the import takes half a second, which runs without shards need not spend
        from torch.distributed.device_mesh import DeviceMesh

        from drawloom.components.distributed.torch_release import import_private_name

        # Results of operations on DTensors are cached by mesh, and include it. An equal mesh that this process had
        # before a loss has other groups, and this rank may have had another place in it.
        import_private_name("torch.distributed.tensor.debug", "_clear_sharding_prop_cache")()
        groups: list[Any] = [self.group(*names) for names in dimensions]
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0].handle, groups[0].device.type)
        all_names = [name for names in dimensions for name in names]
        grid = torch.tensor(self.ranks(*all_names)).view([group.size for group in groups])
        dim_names = tuple(" x ".join(names) for names in dimensions)
        handles = [group.handle for group in groups]
        return DeviceMesh.from_group(handles, groups[0].device.type, grid, mesh_dim_names=dim_names)

    def open_channels(self, edges: Iterable[tuple[int, int]]) -> Mapping[int, P2PChannel]:
        from drawloom.components.distributed.p2p_links import connect_p2p_links

        return connect_p2p_links(self.processes, DIMENSIONS[0], self.layout.list_rank_sets(DIMENSIONS[0]), edges)
