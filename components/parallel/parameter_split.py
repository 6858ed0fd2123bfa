"""Parameters of which each rank of a group has a slice, as ordinary parameters of its modules."""

import attrs
import torch
from torch import nn

from drawloom.components.ports.distributed import Group
from drawloom.components.ports.slices import RankSlice, TensorSlice, rank_shares
from drawloom.graph import UserError


@attrs.frozen
class SplitDim:
    """
    The dimension of a parameter that ranks share, of which `unit` elements at a time stay together.

    With `uneven` the first ranks have one unit more than the last ones where the number of units does not divide.
    """

    dim: int
    unit: int = 1
    uneven: bool = False


def split_parameter(module: nn.Module, name: str, ranks: Group, along: str, how: SplitDim) -> RankSlice:
    """
    Put this rank's slice in the place of a parameter on the meta device.

    Raises UserError if the ranks along a dimension of the mesh, `along`, can't share it so, or one would have nothing.
    """
    owner, _, leaf = name.rpartition(".")
    whole = module.get_parameter(name)
    place = _slice(name, tuple(whole.shape), how, ranks, along)
    local = torch.empty(place.size, dtype=whole.dtype, device=whole.device)
    setattr(module.get_submodule(owner), leaf, nn.Parameter(local, whole.requires_grad))
    return RankSlice(place, ranks)


def _slice(name: str, shape: tuple[int, ...], how: SplitDim, ranks: Group, along: str) -> TensorSlice:
    dim, unit, units = how.dim, how.unit, shape[how.dim] // how.unit
    if units < ranks.size if how.uneven else units % ranks.size:
        what = f"{units} heads of {unit} channels" if unit > 1 else f"dimension {dim} of size {units}"
        fault = "" if how.uneven else " evenly"
        raise UserError(f"mesh.{along} = {ranks.size} ranks can't share {what} of {name}{fault}", exit_code=2)
    mine = rank_shares(units, ranks.size)[ranks.rank]
    offsets = [0] * len(shape)
    offsets[dim] = mine.start * unit
    return TensorSlice(shape, tuple(offsets), (*shape[:dim], len(mine) * unit, *shape[dim + 1 :]))
