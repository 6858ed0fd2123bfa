"""This rank's parameters for other components: names, slices, gradients and state."""

from collections.abc import Mapping, Sequence, Set
from itertools import chain
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.parallel.dimension import Dimension, RankParameters
from drawloom.components.parallel.master_weights import ParameterStore
from drawloom.components.weights.convert import persistent_buffers
from drawloom.ports import MemoryKind, Precision, RankSlice, Role, Stage, TensorSlice, parameter_roles

if TYPE_CHECKING:
    from drawloom.components.parallel.fsdp import ShardedStore


@attrs.define(eq=False, kw_only=True)
class StageParameters:
    """
    Parameters of this rank's `stages`, kept in `store`.

    `splits` are this rank's slices of parameters split over tensor or expert ranks; `experts` are experts' parameter
    names.
    """

    stages: Sequence[Stage]
    store: "ParameterStore | ShardedStore"
    dimensions: Sequence[Dimension]
    precision: Precision
    device: torch.device
    bucket_bytes: int
    splits: Mapping[str, RankSlice]
    experts: Set[str]
    # Trained parameters of each stage, cached because a walk through modules takes milliseconds in every phase.
    _trained: list[dict[str, nn.Parameter]] = attrs.field(init=False)
    _named: dict[str, nn.Parameter] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Collect the trained parameters."""
        self._trained = [
            {name: parameter for name, parameter in stage.named_masters_or_parameters() if parameter.requires_grad}
            for stage in self.stages
        ]
        self._named = {name: parameter for trained in self._trained for name, parameter in trained.items()}

    def find_ranks_with_parameters(self) -> None:
        """Determine which other ranks have these parameters; a collective."""
        for dimension in self.dimensions:
            dimension.exchange_replicated_parameter_names(self._named)

    def roles(self) -> dict[str, Role]:
        """Return the trained parameters' roles, as the stages' modules declare them."""
        declared = {name: role for stage in self.stages for name, role in parameter_roles(stage.module)}
        return {name: declared[name] for name in self._named}

    def all_parameters(self) -> dict[str, nn.Parameter]:
        """Return the stages' parameters by name, including frozen ones."""
        return {name: parameter for stage in self.stages for name, parameter in stage.named_masters_or_parameters()}

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return all stages' trained parameters by name, without duplicates."""
        return list(self._named.items())

    def owned_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return this rank's owned parameters. Every model parameter is owned by exactly one rank."""
        shared = self._rank_parameters
        elsewhere = set[str]().union(*(dimension.list_copies_owned_elsewhere(shared) for dimension in self.dimensions))
        return [(name, parameter) for name, parameter in self._named.items() if name not in elsewhere]

    @property
    def _rank_parameters(self) -> RankParameters:
        """Return how this rank shares its parameters with other ranks, for mesh dimensions."""
        return RankParameters(
            trained=self._named,
            split=self.splits.keys(),
            experts=self.experts,
            sharded=self.store.slices.keys(),
            summed=self.store.parameters_summed_in_backward,
            precision=self.precision,
            device=self.device,
            bucket_bytes=self.bucket_bytes,
        )

    def get_rank_slice(self, name: str) -> TensorSlice | None:
        """Return this rank's slice of a parameter; None if this rank has the whole parameter."""
        split = self.splits[name].tensor_slice if name in self.splits else None
        return TensorSlice.compose(split, self.store.slices.get(name))

    def device_bytes(self) -> dict[MemoryKind, int]:
        """Return the bytes in parameters, buffers, masters and compute copies, and in a step's gradients."""
        modules = [stage.module for stage in self.stages]
        tensors = dict.fromkeys(tensor for module in modules for tensor in chain(module.parameters(), module.buffers()))
        trained = sum(parameter.numel() for _, parameter in self.named_parameters())
        return {
            **self.store.device_bytes(),
            "parameters": sum(map(self.store.local_bytes, tensors)) - self.store.compute_copy_bytes,
            "gradients": trained * self.precision.gradient.itemsize,
        }

    def sum_remaining_gradients(self) -> None:
        """Sum gradients not yet summed in backward passes, along all mesh dimensions, innermost first."""
        shared = self._rank_parameters
        for dimension in reversed(self.dimensions):
            dimension.sum_remaining_gradients(shared)

    def state_tensors(self) -> list[dict[str, Tensor]]:
        """Return trained parameters and persistent buffers (any shape) by stage: the state a checkpoint saves."""
        stages = zip(self.stages, self._trained, strict=True)
        return [{**trained, **persistent_buffers(stage.module)} for stage, trained in stages]
