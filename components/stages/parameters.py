"""What other components see of the parameters of this rank's stages: names, slices, gradients, and a state."""

from collections.abc import Mapping, Sequence, Set
from itertools import chain

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.parallel.data_shard import ShardedStore
from drawloom.components.parallel.dimension import Dimension, SharedParameters
from drawloom.components.parallel.master_weights import ParameterStore
from drawloom.components.ports.distributed import Precision
from drawloom.components.ports.memory import MemoryKind
from drawloom.components.ports.slices import RankSlice, TensorSlice
from drawloom.components.ports.stages import Stage
from drawloom.components.weights.load import persistent_buffers


@attrs.define(eq=False, kw_only=True)
class StageParameters:
    """
    The parameters of this rank's `stages`, which `store` keeps.

    Of those in `splits` the modules have slices, and other tensor or expert ranks the others; those in `experts` are
    experts'.
    """

    stages: Sequence[Stage]
    store: ParameterStore | ShardedStore
    dimensions: Sequence[Dimension]
    precision: Precision
    device: torch.device
    bucket_bytes: int
    splits: Mapping[str, RankSlice]
    experts: Set[str]
    # The trained ones of each stage: to walk through its modules takes milliseconds, and every phase asks for them.
    _trained: list[dict[str, nn.Parameter]] = attrs.field(init=False)
    _named: dict[str, nn.Parameter] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Find the parameters that are trained."""
        self._trained = [
            {name: parameter for name, parameter in stage.named_parameters() if parameter.requires_grad}
            for stage in self.stages
        ]
        self._named = {name: parameter for trained in self._trained for name, parameter in trained.items()}

    def open(self) -> None:
        """Find out which other ranks hold these parameters; a collective."""
        for dimension in self.dimensions:
            dimension.open(self._named)

    def all(self) -> dict[str, nn.Parameter]:
        """All parameters of the stages, frozen ones too."""
        return {name: parameter for stage in self.stages for name, parameter in stage.named_parameters()}

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Return the trained parameters of all stages by name, each once."""
        return list(self._named.items())

    def counted(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters this rank owns: every parameter of the model is owned by exactly one rank."""
        shared = self._shared
        elsewhere = set[str]().union(*(dimension.owned_elsewhere(shared) for dimension in self.dimensions))
        return [(name, parameter) for name, parameter in self._named.items() if name not in elsewhere]

    @property
    def _shared(self) -> SharedParameters:
        return SharedParameters(
            trained=self._named,
            split=self.splits.keys(),
            experts=self.experts,
            sharded=self.store.slices.keys(),
            summed=self.store.summed,
            precision=self.precision,
            device=self.device,
            bucket_bytes=self.bucket_bytes,
        )

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
            "parameters": sum(map(self.store.local_bytes, tensors)) - self.store.copied_bytes,
            "gradients": trained * self.precision.gradient.itemsize,
        }

    def sum_gradients(self) -> None:
        """Sum the gradients that backward passes have not summed, along each dimension, the innermost first."""
        shared = self._shared
        for dimension in reversed(self.dimensions):
            dimension.sum_gradients(shared)

    def changing(self) -> list[dict[str, Tensor]]:
        """What changes from step to step in each stage: trained parameters and persistent buffers, of any shape."""
        stages = zip(self.stages, self._trained, strict=True)
        return [{**trained, **persistent_buffers(stage.module)} for stage, trained in stages]
