"""Tensor parallelism: ranks share every matrix product; `tensor_ranks.py` divides the work."""

from collections.abc import Iterator, Set
from typing import ClassVar

import attrs
from torch import nn

from drawloom import Problem
from drawloom.components.parallel.dimension import Dimension, RankParameters
from drawloom.ports import RankSlice, SplitModel, StageNodes


@attrs.define(eq=False)
class TensorDimension(Dimension):
    """
    Ranks with a share of every matrix product; whole parameters get gradients from every rank's part of the tokens.
    """

    name: ClassVar[str] = "tensor"
    splits_work: ClassVar[bool] = True

    @classmethod
    def check(cls, nodes: StageNodes) -> Iterator[Problem]:
        """Yield problems for models without an even split over the ranks."""
        ranks, model = nodes.sizes.tensor, nodes.model
        if ranks == 1 or model is None or not issubclass(model.component, SplitModel):
            return
        for fault in model.component.find_split_faults(model, cls.name, ranks):
            text = f"{ranks} ranks along 'tensor' share every matrix product of [{model.name}], and {fault}"
            yield nodes.mesh.problem(cls.name, text, "write another number, or 1")

    @classmethod
    def notes(cls, nodes: StageNodes) -> Iterator[str]:
        if (ranks := nodes.sizes.tensor) > 1:
            yield f"linear layers, embedding and head: split over {ranks} ranks, and tokens in between"

    def apply_to_meta_module(self, module: nn.Module) -> dict[str, RankSlice]:
        if self.mesh.tensor_group.size == 1:
            return {}
        from drawloom.components.parallel.tensor_ranks import TensorRanks, split_over_ranks

        return split_over_ranks(module, TensorRanks(self.mesh.tensor_group))

    def list_copies_owned_elsewhere(self, parameters: RankParameters) -> Set[str]:
        return parameters.trained.keys() - parameters.split if self.mesh.indices.tensor else frozenset()

    def sum_remaining_gradients(self, parameters: RankParameters) -> None:
        """Sum whole parameters' gradients, such as norms', over the ranks' tokens."""
        names = parameters.model_parameter_names - parameters.split
        whole = [name for name in parameters.trained if name in names]
        parameters.sum_named_gradients_over_group(whole, self.mesh.tensor_group)
