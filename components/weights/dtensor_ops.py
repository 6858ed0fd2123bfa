"""Leaves for tensors that are spread over ranks. Their imports wait: DTensor takes most of a second to load."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from drawloom.components.ports.weights import Mapper, TensorGroup
from drawloom.components.weights.mapper import same


def distribute(name: str, mesh: Any, placements: Sequence[Any]) -> Mapper:
    """A tensor that every rank holds whole, as a DTensor of each rank's part; no rank sends anything."""

    def spread(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        from torch.distributed.tensor import distribute_tensor

        return [distribute_tensor(tensor, mesh, list(placements), src_data_rank=None) for tensor in tensors]

    return Mapper((TensorGroup((name,), (name,), spread, _whole),))


def gather(name: str) -> Mapper:
    """A DTensor as a whole tensor, on every rank of its mesh, which all take part; one that is whole stays as it is."""
    return Mapper((TensorGroup((name,), (name,), _whole),))


def like(name: str, tensor: Tensor) -> Mapper:
    """A whole tensor spread as this one is, or left whole as this one is."""
    if is_sharded(tensor):
        return distribute(name, tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
    return Mapper((TensorGroup((name,), (name,), same, same),))


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor."""
    return hasattr(tensor, "placements")


def _whole(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensor.full_tensor() if is_sharded(tensor) else tensor for tensor in tensors]  # type: ignore[attr-defined]
