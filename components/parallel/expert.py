"""
Expert parallelism: each rank of a group has some of the experts of every layer, and tokens travel to their experts.

Lepikhin et al. 2020, "GShard", arXiv 2006.16668, section 3.2. All other parts of a model see the same ranks as data,
context and tensor parallel ones. How tokens travel is a dispatcher's business.
"""

import math
from collections.abc import Iterator, Set
from typing import ClassVar

import attrs
from torch import nn

from drawloom.components.parallel.dimension import Dimension, SharedParameters, StageNodes
from drawloom.components.parallel.parameter_split import SplitDim, split_parameter
from drawloom.components.ports.distributed import Group
from drawloom.components.ports.experts import Dispatcher, supports_expert_parallel
from drawloom.components.ports.model import ExpertModel
from drawloom.components.ports.slices import RankSlice
from drawloom.graph import Problem


class ExpertParallel(nn.Module):
    """
    Experts of a layer, whose own parameters are stacked by expert, (experts, ...).

    `dispatcher` brings tokens to them; without one, or with one rank, all experts are here.
    """

    dispatcher: Dispatcher | None = None


NO_DISPATCHER = "ranks along 'expert' share the experts out, and nothing brings tokens to the experts of other ranks"
WRITE_DISPATCHER = 'write dispatcher = { use = "experts.all_to_all" } in [stages]'


@attrs.define(eq=False)
class ExpertDimension(Dimension):
    """Ranks that share the experts of a layer; ranks along `expert_replicate` and `expert_shard` have copies."""

    name: ClassVar[str] = "expert"
    splits_work: ClassVar[bool] = True
    can_capture: ClassVar[bool] = False

    @classmethod
    def check(cls, nodes: StageNodes) -> Iterator[Problem]:
        """Yield problems of models without experts for the ranks, and of a dispatcher that is missing."""
        ranks, model = nodes.sizes.expert, nodes.model
        if ranks == 1 or model is None or not issubclass(model.component, ExpertModel):
            return
        if not (experts := model.component.expert_count(model)):
            text = f"{ranks} ranks along 'expert', and [{model.name}] has no experts"
            yield nodes.mesh.problem(cls.name, text, "write 1")
        elif experts % ranks:
            text = f"{ranks} ranks along 'expert' can't share the {experts} experts of [{model.name}] evenly"
            yield nodes.mesh.problem(cls.name, text, "write another number, or 1")
        elif not any(supports_expert_parallel(part.component) for part in nodes.stages.neighbours("dispatcher")):
            hint = WRITE_DISPATCHER.replace("[stages]", f"[{nodes.stages.name}]")
            yield nodes.mesh.problem(cls.name, NO_DISPATCHER, hint)

    @classmethod
    def notes(cls, nodes: StageNodes) -> Iterator[str]:
        sizes = nodes.sizes
        if sizes.expert == 1:
            return
        shards = sizes.data_shard * sizes.context
        replica = shards * sizes.tensor
        further = replica // math.gcd(replica, sizes.expert)
        sharded = f", and sharded over {further}" if further > 1 and shards > 1 else ""
        yield f"experts: partitioned over {sizes.expert} ranks{sharded}"

    def split(self, module: nn.Module) -> dict[str, RankSlice]:
        return split_experts(module, self.mesh.expert_group)

    def owned_elsewhere(self, parameters: SharedParameters) -> Set[str]:
        """Return experts' parameters that are whole on several ranks of one copy of the model."""
        if not parameters.experts or not self.mesh.indices.expert_shard:
            return frozenset()
        return parameters.experts - parameters.sharded

    def sum_gradients(self, parameters: SharedParameters) -> None:
        """Sum the gradients of experts over the ranks that have the same ones."""
        if parameters.experts:
            parameters.sum_named(
                [name for name in parameters.trained if name in parameters.experts - parameters.summed],
                self.mesh.expert_data_group,
            )


def use_dispatcher(module: nn.Module, dispatcher: Dispatcher | None) -> None:
    """Let a dispatcher bring tokens to the experts of a model."""
    for part in module.modules():
        if isinstance(part, ExpertParallel):
            part.dispatcher = dispatcher


def split_experts(module: nn.Module, ranks: Group) -> dict[str, RankSlice]:
    """
    Partition the experts of a model on the meta device over ranks, and return the slices of their parameters by name.

    Raises UserError for a number of experts that is not divisible.
    """
    splits: dict[str, RankSlice] = {}
    for path, part in module.named_modules() if ranks.size > 1 else ():
        if isinstance(part, ExpertParallel):
            for leaf, _ in list(part.named_parameters(recurse=False)):
                name = f"{path}.{leaf}" if path else leaf
                splits[name] = split_parameter(module, name, ranks, ExpertDimension.name, SplitDim(0))
    return splits
