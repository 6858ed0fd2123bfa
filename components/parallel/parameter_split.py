"""Parameters split over a group; a slice is an ordinary parameter of its module."""

import attrs
import torch
from torch import nn

from drawloom import UserError
from drawloom.ports import Group, RankSlice, TensorSlice, divide_into_shares


@attrs.frozen
class SplitDim:
    """
    A parameter's split dimension, in units of `unit` consecutive elements.

    With `uneven`, the unit count need not be divisible by the rank count: the first ranks get one unit more.
    """

    dim: int
    unit: int = 1
    uneven: bool = False


def replace_by_rank_slice(
    module: nn.Module, name: str, group: Group, mesh_dimension: str, split_dim: SplitDim
) -> RankSlice:
    """
    Replace a parameter on the meta device by this rank's slice.

    Raises UserError if the ranks along the mesh dimension `mesh_dimension` can't share the parameter like this.
    """
    owner, _, leaf = name.rpartition(".")
    whole = module.get_parameter(name)
    tensor_slice = _compute_rank_slice(name, tuple(whole.shape), split_dim, group, mesh_dimension)
    local = torch.empty(tensor_slice.size, dtype=whole.dtype, device=whole.device)
    setattr(module.get_submodule(owner), leaf, nn.Parameter(local, whole.requires_grad))
    return RankSlice(tensor_slice, group)


def _compute_rank_slice(
    name: str, shape: tuple[int, ...], split_dim: SplitDim, group: Group, mesh_dimension: str
) -> TensorSlice:
    """
    Return this rank's slice along the split dimension.

    Raises UserError if the rank count doesn't divide the unit count or, with `uneven`, exceeds it.
    """
    dim, unit = split_dim.dim, split_dim.unit
    units = shape[dim] // unit
    if units < group.size if split_dim.uneven else units % group.size:
        part = f"{units} heads of {unit} channels" if unit > 1 else f"dimension {dim} of size {units}"
        fault, remedy = ("", f"at most {units}") if split_dim.uneven else (" evenly", f"a divisor of {units}")
        raise UserError(
            f"mesh.{mesh_dimension} = {group.size} ranks can't partition {part} of {name}{fault}; write {remedy}",
            exit_code=2,
        )
    local_units = divide_into_shares(units, group.size)[group.rank]
    offsets = [0] * len(shape)
    offsets[dim] = local_units.start * unit
    return TensorSlice(shape, tuple(offsets), (*shape[:dim], len(local_units) * unit, *shape[dim + 1 :]))
