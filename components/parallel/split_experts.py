"""A model's experts, partitioned over ranks, and their dispatcher."""

from torch import nn

from drawloom.components.parallel.tensor_ranks import SplitDim, replace_by_rank_slice
from drawloom.ports import Dispatcher, Group, Mesh, RankSlice


class ExpertParallel(nn.Module):
    """
    A layer's experts; the module's own parameters are stacked by expert, (experts, ...).

    `dispatcher` sends tokens to the experts; without one, or with one rank, all experts are on this rank.
    """

    dispatcher: Dispatcher | None = None

    def create_dispatcher(self, mesh: Mesh) -> Dispatcher:
        """Return the default dispatcher for experts partitioned along `mesh.expert`."""
        raise NotImplementedError


def set_dispatcher(module: nn.Module, dispatcher: Dispatcher | None) -> None:
    """Set the dispatcher on all experts in a model."""
    for submodule in module.modules():
        if isinstance(submodule, ExpertParallel):
            submodule.dispatcher = dispatcher


def set_default_dispatchers(module: nn.Module, mesh: Mesh) -> list[Dispatcher]:
    """Set layers' own dispatchers between ranks unless the recipe names one, and return all layers' dispatchers."""
    layers = [part for part in module.modules() if isinstance(part, ExpertParallel)]
    for layer in layers:
        if layer.dispatcher is None:
            layer.dispatcher = layer.create_dispatcher(mesh)
    return [layer.dispatcher for layer in layers if layer.dispatcher is not None]


def split_experts(module: nn.Module, group: Group) -> dict[str, RankSlice]:
    """
    Partition a meta model's experts over ranks, and return their parameters' slices by name.

    Raises UserError if the expert count is not divisible by the rank count.
    """
    splits: dict[str, RankSlice] = {}
    for path, submodule in module.named_modules() if group.size > 1 else ():
        if isinstance(submodule, ExpertParallel):
            for leaf, _ in list(submodule.named_parameters(recurse=False)):
                name = f"{path}.{leaf}" if path else leaf
                splits[name] = replace_by_rank_slice(module, name, group, "expert", SplitDim(0))
    return splits
