"""
Expert parallelism: each rank of a group has some of the experts of every layer, and tokens travel to their experts.

Lepikhin et al. 2020, "GShard", arXiv 2006.16668, section 3.2. All other parts of a model see the same ranks as data,
context and tensor parallel ones. How tokens travel is a dispatcher's business.
"""

from torch import nn

from drawloom.components.parallel.parameter_split import SplitDim, split_parameter
from drawloom.components.ports.distributed import Group
from drawloom.components.ports.experts import Dispatcher
from drawloom.components.ports.slices import RankSlice


class ExpertParallel(nn.Module):
    """
    Experts of a layer, whose own parameters are stacked by expert, (experts, ...).

    `dispatcher` brings tokens to them; without one, or with one rank, all experts are here.
    """

    dispatcher: Dispatcher | None = None


def share_experts(module: nn.Module, ranks: Group, dispatcher: Dispatcher | None) -> dict[str, RankSlice]:
    """
    Share the experts of a model on the meta device out over ranks; gives the slices of their parameters, by name.

    Raises UserError for a number of experts that does not divide.
    """
    splits: dict[str, RankSlice] = {}
    for path, part in module.named_modules():
        if isinstance(part, ExpertParallel):
            part.dispatcher = dispatcher
            if ranks.size > 1:
                for leaf, _ in list(part.named_parameters(recurse=False)):
                    name = f"{path}.{leaf}" if path else leaf
                    splits[name] = split_parameter(module, name, ranks, "expert", SplitDim(0))
    return splits
