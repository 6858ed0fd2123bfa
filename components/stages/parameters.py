"""What other components see of the parameters of this rank's stages: names, slices, gradients, and a state."""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from itertools import chain
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.parallel.buckets import sum_in_buckets
from drawloom.components.parallel.data_shard import ShardedStore
from drawloom.components.parallel.master_weights import ParameterStore
from drawloom.components.ports.distributed import DATA, EXPERT_REPLICAS, SHARDS, Mesh, Precision
from drawloom.components.ports.memory import MemoryKind
from drawloom.components.ports.slices import RankSlice, TensorSlice
from drawloom.components.ports.stages import LOSS, Stage, gradient_of
from drawloom.components.weights.load import persistent_buffers


@attrs.define(eq=False)
class StageParameters:
    """
    The parameters of this rank's `stages`, which `store` keeps.

    Of those in `splits` the modules have slices, and other tensor or expert ranks the others; those in `of_experts` are
    experts'.
    """

    stages: Sequence[Stage]
    store: ParameterStore | ShardedStore
    mesh: Mesh
    precision: Precision
    device: torch.device
    bucket_bytes: int
    splits: Mapping[str, RankSlice]
    of_experts: Set[str]
    # The trained ones of each stage: to walk through its modules takes milliseconds, and every phase asks for them.
    _trained: list[dict[str, nn.Parameter]] = attrs.field(init=False)
    _shared: dict[str, list[int]] = attrs.field(init=False, factory=dict)
    _on_earlier_ranks: set[str] = attrs.field(init=False, factory=set)

    def __attrs_post_init__(self) -> None:
        """Find the parameters that are trained."""
        self._trained = [
            {name: parameter for name, parameter in stage.named_parameters() if parameter.requires_grad}
            for stage in self.stages
        ]

    def open(self) -> None:
        """Find the parameters that several pipeline ranks hold: a tied embedding is on the first and on the last."""
        group = self.mesh.group("pipeline")
        shapes: list[dict[str, list[int]]] = group.gather_json({name: [*part.shape] for name, part in self.named()})
        times = Counter(name for names in shapes for name in names)
        everywhere = {name: shape for names in shapes for name, shape in names.items()}
        self._shared = {name: everywhere[name] for name in sorted(times) if times[name] > 1}
        self._on_earlier_ranks = {name for names in shapes[: group.rank] for name in names}

    def all(self) -> dict[str, nn.Parameter]:
        """All parameters of the stages, frozen ones too."""
        return {name: parameter for stage in self.stages for name, parameter in stage.named_parameters()}

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """The trained parameters of all stages, each once."""
        return list({name: parameter for trained in self._trained for name, parameter in trained.items()}.items())

    def counted(self) -> list[tuple[str, nn.Parameter]]:
        """Those of `named` that no earlier rank holds, of those that are no replicas of this one."""
        other = set(self._on_earlier_ranks)
        mine = {name for name, _ in self.named()}
        whole = mine - self.store.slices.keys()
        # Several replicas hold one copy of the experts together where `expert` is larger than a replica.
        replicas_of_a_copy = self.mesh.size("data_replicate") // self.mesh.replicas.size
        if self.mesh.index("data_replicate") % replicas_of_a_copy:
            other |= mine - self.of_experts
        if self.mesh.group(*SHARDS).rank:
            other |= whole - self.of_experts
        if self.mesh.index("tensor"):
            other |= mine - self.splits.keys()
        if self.of_experts and self.mesh.index("expert_shard"):
            other |= whole & self.of_experts
        return [(name, part) for name, part in self.named() if name not in other]

    def slice(self, name: str) -> TensorSlice | None:
        """The slice that this rank has of a parameter; None for a whole one."""
        place = self.splits[name].place if name in self.splits else None
        return TensorSlice.nested(place, self.store.slices.get(name))

    def memory_bytes(self) -> dict[MemoryKind, int]:
        """Bytes of parameters, buffers, masters and compute copies, and of the gradients that a step will have."""
        modules = [stage.module for stage in self.stages]
        tensors = dict.fromkeys(each for module in modules for each in chain(module.parameters(), module.buffers()))
        trained = sum(parameter.numel() for _, parameter in self.named())
        return {
            **self.store.memory_bytes(),
            "parameters": sum(map(self.store.held_bytes, tensors)) - self.store.copied_bytes,
            "gradients": trained * self.precision.gradient.itemsize,
        }

    def sum_gradients(self) -> None:
        """Sum the gradients that backward passes have not summed; a pipeline rank without a parameter adds zeros."""
        mine = dict(self.named())
        wide = torch.promote_types(self.precision.gradient, self.precision.reduce)
        # Of parameters that are whole on tensor ranks, such as norms', each has the gradient of its own tokens.
        partial = [part for name, part in mine.items() if name not in self.splits and not _is_of_loss(name)]
        sum_in_buckets([gradient_of(part) for part in partial], self.mesh.group("tensor"), wide, self.bucket_bytes)
        left = {name: gradient_of(part) for name, part in mine.items() if name not in self.store.summed}
        dense = [grad for name, grad in left.items() if name not in self.of_experts]
        sum_in_buckets(dense, self.mesh.group(*DATA), wide, self.bucket_bytes)
        if self.of_experts:
            of_experts = [grad for name, grad in left.items() if name in self.of_experts]
            sum_in_buckets(of_experts, self.mesh.group(*EXPERT_REPLICAS), wide, self.bucket_bytes)
        # A collective of the whole group: ranks without a parameter take part with zeros.
        like: Any = {"dtype": self.precision.gradient, "device": self.device}
        shared = [
            gradient_of(mine[name]) if name in mine else torch.zeros(shape, **like)
            for name, shape in self._shared.items()
        ]
        sum_in_buckets(shared, self.mesh.group("pipeline"), wide, self.bucket_bytes)

    def changing(self) -> list[dict[str, Tensor]]:
        """What changes from step to step in each stage: trained parameters and persistent buffers, of any shape."""
        stages = zip(self.stages, self._trained, strict=True)
        return [{**trained, **persistent_buffers(stage.module)} for stage, trained in stages]


def _is_of_loss(name: str) -> bool:
    return name.startswith(f"{LOSS}.")
