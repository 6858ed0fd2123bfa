"""Ports for adapters: trained additions to a frozen model, such as LoRA's low-rank factors."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import ClassVar, Protocol, runtime_checkable

import attrs
from torch import nn

from drawloom.components.ports.weights import Mapper
from drawloom.graph import port


@port
class Adapter(Protocol):
    """A component that adds parameters to a frozen model on the meta device, or unfreezes some (`ThawingAdapter`)."""

    @property
    def targets(self) -> Sequence[str]:
        """
        Name patterns for modules or parameters; a pattern without a match in the model is an error in the
        recipe.
        """

    def adapt_and_list_matched_targets(self, module: nn.Module) -> Collection[str]:
        """
        Adapt a span of the model in place, and return the patterns that match.

        Existing parameters keep their names; added parameters belong to an `AdaptedLayer`.
        """


@runtime_checkable
class ThawingAdapter(Protocol):
    """An adapter that trains the model's own weights, so no pass can compute the model without it."""

    thaws: ClassVar[bool]


def trains_base_weights(adapter: object) -> bool:
    """Return whether an adapter, an object or a class, trains the model's own weights."""
    return isinstance(adapter, ThawingAdapter) and adapter.thaws


@attrs.frozen
class LowRank:
    """
    Pair of low-rank factors, in the terms of PEFT's `adapter_config.json`.

    `target` names a module in transformers or, if `fused`, a parameter that stacks experts. `scale` multiplies the
    matrices' product.
    """

    target: str
    rank: int
    scale: float
    dropout: float = 0.0
    dora: bool = False
    fused: bool = False


Fill = Callable[[str, nn.Parameter, float], None]
"""Callback that fills the parameter of a name with normal numbers of a standard deviation."""


class AdaptedLayer(ABC):
    """
    A layer with an adapter: a module with the replaced layer's parameters and the adapter's.

    The methods get the layer's name in the model. If `active` is False, the layer computes like the layer it
    replaces.
    """

    active: bool = True

    @property
    @abstractmethod
    def adapter_parameter_names(self) -> list[str]:
        """The adapter's parameter names inside the layer."""

    @abstractmethod
    def initialize_adapter(self, name: str, fill: Fill) -> None:
        """
        Initialize the adapter's parameter `name` in place; the layer's other parameters are already initialized.
        """

    @abstractmethod
    def make_merge_mapper(self, name: str, unmerged_weight_name: str | None = None) -> Mapper:
        """
        Return the mapper from the layer's parameters to an equivalent layer without an adapter.

        A group's first input is the adapted parameter. With `unmerged_weight_name`, the first group also outputs this
        parameter under that name, without the adapter's change.
        """

    @abstractmethod
    def make_mapper_to_peft(self, name: str) -> Mapper:
        """
        Return the mapper from the adapter's parameters to the tensors in PEFT's `adapter_model.safetensors`, with an
        inverse.
        """

    @abstractmethod
    def list_low_rank_pairs(self, name: str) -> list[LowRank]:
        """Return the low-rank factor pairs in the adapter of the layer `name`."""


def find_adapted_layers(module: nn.Module) -> Iterator[tuple[str, AdaptedLayer]]:
    """Iterate over the layers with adapters, by name."""
    return ((name, part) for name, part in module.named_modules() if isinstance(part, AdaptedLayer))


def adapter_parameter_names(module: nn.Module) -> set[str]:
    """Return the names of all adapter parameters in a module."""
    return {f"{name}.{leaf}" for name, layer in find_adapted_layers(module) for leaf in layer.adapter_parameter_names}
