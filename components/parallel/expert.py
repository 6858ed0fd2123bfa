"""
Expert parallelism: a rank has some of every layer's experts, and tokens are sent to their experts.

Lepikhin et al. 2020, "GShard", arXiv 2006.16668, section 3.2. The rest of the model treats the same ranks as data,
context and tensor parallel ranks. A dispatcher exchanges the tokens.
"""

import math
from collections.abc import Iterator, Set
from typing import ClassVar

import attrs
from torch import nn

from drawloom import Problem
from drawloom.components.parallel.dimension import Dimension, RankParameters
from drawloom.ports import ExpertModel, RankSlice, StageNodes, supports_expert_parallel


@attrs.define(eq=False)
class ExpertDimension(Dimension):
    """Ranks that partition a layer's experts; ranks along `expert_replicate` and `expert_shard` have copies."""

    name: ClassVar[str] = "expert"
    splits_work: ClassVar[bool] = True

    @classmethod
    def check(cls, nodes: StageNodes) -> Iterator[Problem]:
        """Yield a problem for experts without a partition over the ranks, and for a dispatcher on one rank."""
        ranks, model = nodes.sizes.expert, nodes.model
        if ranks == 1 or model is None or not issubclass(model.component, ExpertModel):
            return
        if not (experts := model.component.expert_count(model)):
            text = f"{ranks} ranks along 'expert', and [{model.name}] has no experts"
            yield nodes.mesh.problem(cls.name, text, "write 1")
        elif experts % ranks:
            text = f"{ranks} ranks along 'expert' can't share the {experts} experts of [{model.name}] evenly"
            yield nodes.mesh.problem(cls.name, text, "write another number, or 1")
        for dispatcher in nodes.stages.neighbours("dispatcher"):
            if not supports_expert_parallel(dispatcher.component):
                text = f"the experts are on {ranks} ranks, and {dispatcher.use!r} sends no tokens to others"
                yield nodes.stages.problem("dispatcher", text, "leave it out, or write one such as experts.all_to_all")

    @classmethod
    def notes(cls, nodes: StageNodes) -> Iterator[str]:
        sizes = nodes.sizes
        if sizes.expert == 1:
            return
        shards = sizes.data_shard * sizes.context
        replica = shards * sizes.tensor
        expert_shards = replica // math.gcd(replica, sizes.expert)
        sharded = f", and sharded over {expert_shards}" if expert_shards > 1 and shards > 1 else ""
        yield f"experts: partitioned over {sizes.expert} ranks{sharded}"

    def describe(self, whole: nn.Module) -> Iterator[str]:
        """Yield the name of the experts' dispatcher, after setting default dispatchers in `whole`, a model on meta."""
        if self.mesh.sizes.expert == 1:
            return
        from drawloom.components.parallel.split_experts import set_default_dispatchers

        for dispatcher in set_default_dispatchers(whole, self.mesh)[:1]:  # all layers have the same kind
            module = type(dispatcher).__module__.removeprefix("drawloom.components.")
            yield f"{module} between {self.mesh.sizes.expert} ranks"

    def apply_to_meta_module(self, module: nn.Module) -> dict[str, RankSlice]:
        if self.mesh.sizes.expert == 1:
            return {}
        from drawloom.components.parallel.split_experts import set_default_dispatchers, split_experts

        set_default_dispatchers(module, self.mesh)
        return split_experts(module, self.mesh.expert_group)

    def list_copies_owned_elsewhere(self, parameters: RankParameters) -> Set[str]:
        """Return the experts' parameters that several ranks in one model copy have, except on the first rank."""
        if not parameters.experts or not self.mesh.indices.expert_shard:
            return frozenset()
        return parameters.experts - parameters.sharded

    def sum_remaining_gradients(self, parameters: RankParameters) -> None:
        """Sum experts' gradients over the ranks with the same experts."""
        if parameters.experts:
            parameters.sum_named_gradients_over_group(
                [name for name in parameters.trained if name in parameters.experts - parameters.summed],
                self.mesh.expert_data_group,
            )
