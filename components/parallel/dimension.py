"""Interface for a mesh dimension, along which ranks share a model."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import ClassVar

import attrs
import torch
from torch import Tensor, nn

from drawloom import Problem
from drawloom.ports import LOSS, Group, Mesh, Precision, RankSlice, StageNodes, get_or_create_gradient


@attrs.frozen(kw_only=True, eq=False)
class RankParameters:
    """
    This rank's trained parameters, and sets of names by the way ranks share the parameters.

    `split` are parameters with a slice on this rank along `tensor` or `expert`. `experts` belong to experts. `sharded`
    are sharded by FSDP. Backward passes sum the gradients of `summed` over ranks with other tokens.
    """

    trained: Mapping[str, nn.Parameter]
    split: Set[str]
    experts: Set[str]
    sharded: Set[str]
    summed: Set[str]
    precision: Precision
    device: torch.device
    bucket_bytes: int

    @property
    def model_parameter_names(self) -> Set[str]:
        """The names of the model's parameters, without the loss's."""
        return {name for name in self.trained if not name.startswith(f"{LOSS}.")}

    def get_gradient_or_zeros(self, name: str, shape: Sequence[int] = ()) -> Tensor:
        """Return a parameter's gradient, or zeros with `shape` if this rank doesn't train it."""
        if name in self.trained:
            return get_or_create_gradient(self.trained[name])
        return torch.zeros(shape, dtype=self.precision.gradient, device=self.device)

    def sum_gradients_over_group(self, gradients: Sequence[Tensor], group: Group) -> None:
        """Sum gradients over a group, in place, in `precision.reduce` or in their own wider dtype."""
        if group.size == 1:
            return
        from drawloom.components.parallel.buckets import sum_in_buckets

        dtype = torch.promote_types(self.precision.gradient, self.precision.reduce)
        sum_in_buckets(gradients, group, dtype, self.bucket_bytes)

    def sum_named_gradients_over_group(self, names: Iterable[str], group: Group) -> None:
        """Sum the named parameters' gradients over a group, in place."""
        self.sum_gradients_over_group([self.get_gradient_or_zeros(name) for name in names], group)


@attrs.define(eq=False)
class Dimension:
    """
    One mesh dimension, along which ranks share a model in a certain way.

    The methods are called for meshes with any size. The defaults share nothing; a dimension overrides the methods it
    needs.
    """

    name: ClassVar[str]
    splits_work: ClassVar[bool] = False
    """Whether ranks compute parts of the same microbatch, so that collectives run inside of a stage's passes."""

    mesh: Mesh

    @classmethod
    def check(cls, nodes: StageNodes) -> Iterator[Problem]:
        """Yield a problem if the dimension does not support the recipe's model or dtypes."""
        yield from ()

    @classmethod
    def notes(cls, nodes: StageNodes) -> Iterator[str]:
        """Yield sentences for `explain` about the ranks' shared work and memory."""
        yield from ()

    def describe(self, whole: nn.Module) -> Iterator[str]:
        """Yield phrases for the run's header about a whole model on the meta device."""
        yield from ()

    def apply_to_meta_module(self, module: nn.Module) -> dict[str, RankSlice]:
        """
        Replace a meta module's parameters by this rank's slices, and return the slices by name.

        Raises UserError for a parameter without a possible split.
        """
        return {}

    def exchange_replicated_parameter_names(self, trained: Mapping[str, nn.Parameter]) -> None:
        """Determine which other ranks have this rank's parameters; a collective over the dimension's ranks."""

    def list_copies_owned_elsewhere(self, parameters: RankParameters) -> Set[str]:
        """Return the names of this rank's parameters that are copies: another rank along this dimension owns them."""
        return frozenset()

    def sum_remaining_gradients(self, parameters: RankParameters) -> None:
        """Sum gradients over the dimension's ranks, except gradients summed in backward passes; a collective."""
