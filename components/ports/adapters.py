"""Adapters: what is trained of a model whose other weights are frozen, such as the low-rank factors of LoRA."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar, Protocol, runtime_checkable

import attrs
from torch import nn

from drawloom.components.ports.weights import Mapper
from drawloom.graph import port


@port
class Adapter(Protocol):
    """Adds parameters to a frozen model on the meta device, or thaws some of its own (`ThawingAdapter`)."""

    @property
    def targets(self) -> Sequence[str]:
        """Patterns of the names of modules or parameters; the recipe is wrong if one matches nothing in the model."""
        ...

    def inject(self, module: nn.Module) -> Collection[str]:
        """
        Adapt a span of the model in place; gives the patterns that matched something in it.

        Parameters that are there keep their names, and those that are added belong to an `AdaptedLayer`.
        """
        ...


@runtime_checkable
class ThawingAdapter(Protocol):
    """An adapter of the model's own weights: no pass can leave its changes out."""

    thaws: ClassVar[bool]


def thaws_weights(adapter: object) -> bool:
    """Return whether an adapter, which is an object or a class, trains weights of the model itself."""
    return isinstance(adapter, ThawingAdapter) and adapter.thaws


@attrs.frozen
class LowRank:
    """
    One pair of low-rank factors, as PEFT's `adapter_config.json` describes it.

    `target` is the name of a module in transformers; if `fused`, of a parameter that stacks experts. `scale` is what
    the product of the factors is multiplied by.
    """

    target: str
    rank: int
    scale: float
    dropout: float = 0.0
    dora: bool = False
    fused: bool = False


Fill = Callable[[str, nn.Parameter, float], None]
"""Fills a parameter of this name with normal numbers of this standard deviation."""


class AdaptedLayer(ABC):
    """
    A layer with an adapter: a module with the parameters of the layer that it replaces, and some of its own.

    The methods take the name of the layer in the model. A layer that is not `active` computes as the one that it
    replaces.
    """

    active: bool = True

    @property
    @abstractmethod
    def adapter_names(self) -> list[str]:
        """The names, in the layer, of the adapter's parameters."""

    @abstractmethod
    def fill_adapter(self, name: str, fill: Fill) -> None:
        """Fill the adapter's parameters, in place, with their initial values; the layer's others have theirs."""

    @abstractmethod
    def merge_mapper(self, name: str, base: str | None = None) -> Mapper:
        """
        Maps the layer's parameters to those of a layer without an adapter that computes the same.

        Each group begins with the parameter that it changes. With `base`, the first also gives that parameter
        unchanged, under this name.
        """

    @abstractmethod
    def peft_mapper(self, name: str) -> Mapper:
        """Maps the adapter's parameters to the tensors of PEFT's `adapter_model.safetensors`."""

    @abstractmethod
    def low_ranks(self, name: str) -> list[LowRank]:
        """The pairs of low-rank factors."""
