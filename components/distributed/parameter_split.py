"""Parameters of which each rank of a group has a slice, as ordinary parameters of its modules."""

import torch
from torch import nn

from drawloom.components.ports.distributed import Group
from drawloom.components.ports.slices import RankSlice, TensorSlice
from drawloom.graph import UserError


def split_parameter(module: nn.Module, name: str, ranks: Group, along: str, dim: int, unit: int = 1) -> RankSlice:
    """
    Put this rank's slice in the place of a parameter on the meta device, split along `dim` in units of elements.

    Raises UserError if the ranks along a dimension of the mesh, `along`, can't share it evenly.
    """
    owner, _, leaf = name.rpartition(".")
    whole = module.get_parameter(name)
    place = _slice(name, tuple(whole.shape), dim, unit, ranks, along)
    local = torch.empty(place.size, dtype=whole.dtype, device=whole.device)
    setattr(module.get_submodule(owner), leaf, nn.Parameter(local, whole.requires_grad))
    return RankSlice(place, ranks)


def _slice(name: str, shape: tuple[int, ...], dim: int, unit: int, ranks: Group, along: str) -> TensorSlice:
    units = shape[dim] // unit
    if units % ranks.size:
        what = f"{units} heads of {unit} channels" if unit > 1 else f"dimension {dim} of size {units}"
        raise UserError(f"mesh.{along} = {ranks.size} ranks can't share {what} of {name} evenly", exit_code=2)
    size = shape[dim] // ranks.size
    offsets = [0] * len(shape)
    offsets[dim] = ranks.rank * size
    return TensorSlice(shape, tuple(offsets), (*shape[:dim], size, *shape[dim + 1 :]))
