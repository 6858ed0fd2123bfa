"""Trainable parameters implementing the port, without stages."""

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drawloom.components.ports.stages import Role, default_role

MATRIX_AND_VECTOR = {"matrix": (3, 4), "vector": (4,)}


class Weights:
    """Random parameters of given shapes. A value depends on its parameter's name alone, not on other parameters."""

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]] = MATRIX_AND_VECTOR,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.parameters = {
            name: nn.Parameter(_draw(name, shape, 0).to(device, dtype)) for name, shape in shapes.items()
        }
        self._others: Collection[str] = ()

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, nn.Parameter], others: Collection[str] = ()) -> "Weights":
        """Return these parameters; another rank counts `others`."""
        weights = cls({})
        weights.parameters, weights._others = dict(parameters), others
        return weights

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.parameters.items())

    def parameter_slices(self) -> dict[str, Any]:
        return dict.fromkeys(self.parameters)

    def roles(self) -> dict[str, Role]:
        return {name: default_role(name, part) for name, part in self.named_parameters()}

    def owned_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.named_parameters() if name not in self._others]

    def sum_remaining_gradients(self) -> None: ...

    def give_gradients(self, seed: int) -> None:
        """Give each parameter a random gradient."""
        for name, parameter in self.named_parameters():
            gradient = _draw(name, parameter.shape, seed + 1)
            parameter.grad = gradient.to(parameter.device, parameter.grad_dtype or parameter.dtype)


def _draw(name: str, shape: Sequence[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    return torch.randn(tuple(shape), generator=generator)
