"""
Batches: trees of tensors in which every leaf declares how it is divided.

A microbatch contains some rows, and a rank along `context` some tokens of every row. Data workers, microbatches,
context slices and copies to a device only read the specs; losses and metrics know a leaf by its name.
"""

from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, ClassVar, Literal, Self, dataclass_transform, get_args

import attrs
import torch
from torch import Tensor

from drawloom.components.state.trees import list_leaves, map_leaves

LeafSpec = Literal["rows", "tokens", "replicated", "host"]
"""
How a leaf is divided. "rows": the first dimension is rows. "tokens": the first two dimensions are rows and the tokens
of a row. "replicated": every microbatch and rank has all of it. "host": a plain value for metrics, such as a count;
losses do not see it.
"""


def leaf(spec: LeafSpec, *, default: Any = attrs.NOTHING, kw_only: bool = False) -> Any:
    """Declare a field of a batch: a tensor, or a tree of tensors, that is divided as `spec` says."""
    return attrs.field(default=default, kw_only=kw_only, metadata={"spec": spec})


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(leaf,))
class Batch:
    """
    Base class of batches: a subclass declares leaves, and becomes an immutable attrs class.

    Every batch has a leaf `weights`, float32 and not negative: how much a row, (rows,), or a token, (rows, length),
    counts in the loss. A data set computes weights from whole rows: they do not depend on how a batch is divided.

        class Images(Batch):
            pixels: Tensor = leaf("rows")  # (rows, height, width)
            labels: Tensor = leaf("rows")  # int64 (rows,)
            weights: Tensor = leaf("rows")
    """

    __attrs_attrs__: ClassVar[tuple[Any, ...]]
    specs: ClassVar[Mapping[str, LeafSpec]] = {}
    weights: Tensor

    def __init_subclass__(cls) -> None:
        """Turn the subclass into an attrs class. Raises TypeError for a field that `leaf` does not declare."""
        attrs.frozen(cls, slots=False, eq=False)  # in place, as the class has no slots
        fields = attrs.fields(cls)
        for field in fields:
            if field.metadata.get("spec") not in get_args(LeafSpec):
                specs = ", ".join(f'leaf("{spec}")' for spec in get_args(LeafSpec))
                raise TypeError(f"{cls.__name__}.{field.name} does not declare how it is divided; write one of {specs}")
            if field.metadata["spec"] == "host" and field.default is attrs.NOTHING:
                raise TypeError(f'{cls.__name__}.{field.name} needs a default: write leaf("host", default=...)')
        cls.specs = {field.name: field.metadata["spec"] for field in fields}
        if cls.specs.get("weights") not in ("rows", "tokens"):
            raise TypeError(f'{cls.__name__} does not declare the leaf `weights`; write weights: Tensor = leaf("rows")')

    @classmethod
    def make_meta_batch(cls, rows: int, length: int) -> Self:
        """
        Return a batch on the meta device, for plans; a row has `length` tokens.

        Raises NotImplementedError for a class that does not describe its tensors.
        """
        raise NotImplementedError(
            f"{cls.__name__} does not describe its tensors for plans; "
            "define the class method make_meta_batch(rows, length)"
        )

    @property
    def row_count(self) -> int:
        """Return the number of rows."""
        return len(self.weights)

    @property
    def length(self) -> int:
        """Return the sequence length, or 0 for a batch without a leaf of tokens."""
        return next((tensor.shape[1] for _, spec, tensor in self.named_tensors() if spec == "tokens"), 0)

    @property
    def token_count(self) -> int:
        """Count this batch's tokens: all positions with a weight, even 0."""
        return self.weights.numel()

    def has_one_document_per_row(self) -> bool:
        """Return whether each row is known to be one document."""
        return False

    def with_zero_weights(self) -> Self:
        """Return the same rows with weight 0."""
        return self.evolve(weights=torch.zeros_like(self.weights))

    def evolve(self, **values: Any) -> Self:
        """Return a copy with other values for some leaves. Raises TypeError for a name that is not a leaf."""
        if unknown := values.keys() - self.specs.keys():
            raise TypeError(f"{type(self).__name__} has no leaf {', '.join(sorted(unknown))}")
        changed = object.__new__(type(self))  # copy.copy takes microseconds
        changed.__dict__.update(self.__dict__, **values)
        return changed

    def map_tensors(self, function: Callable[[Tensor], Tensor], specs: Set[LeafSpec]) -> Self:
        """Return a copy with `function` applied to every tensor whose leaf has one of the specs."""

        def apply_to_tensor(value: Any) -> Any:
            return function(value) if isinstance(value, Tensor) else value

        changed = {}
        for name, spec in self.specs.items():
            if spec in specs:
                value = getattr(self, name)
                changed[name] = function(value) if isinstance(value, Tensor) else map_leaves(apply_to_tensor, value)
        return self.evolve(**changed)

    def take_rows(self, rows: slice) -> Self:
        """Return a slice of rows; tensors are views."""
        return self.map_tensors(lambda tensor: tensor[rows], {"rows", "tokens"})

    def take_tokens(self, indices: Tensor) -> Self:
        """Return all rows with only the tokens at `indices`, int64 (tokens,)."""
        return self.map_tensors(lambda tensor: tensor.index_select(1, indices), {"tokens"})

    def without_host_values(self) -> Self:
        """Return a copy in which leaves declared "host", which stay off the device, have their default values."""
        return self.evolve(
            **{field.name: field.default for field in attrs.fields(type(self)) if field.metadata["spec"] == "host"}
        )

    def named_tensors(self) -> Iterator[tuple[str, LeafSpec, Tensor]]:
        """Yield the name and spec of every leaf with its tensors, in order."""
        for name, spec in self.specs.items():
            yield from ((name, spec, value) for value in list_leaves(getattr(self, name)) if isinstance(value, Tensor))

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors in leaf order."""
        return tuple(tensor for _, _, tensor in self.named_tensors())

    def check(self) -> None:
        """Raise ValueError if tensors do not agree in rows and tokens; the message names the leaf and the shapes."""
        length = next((tensor.shape[1:2] for _, spec, tensor in self.named_tensors() if spec == "tokens"), ()) or (0,)
        begins = {"rows": (self.row_count,), "tokens": (self.row_count, *length), "replicated": ()}
        for name, spec, tensor in self.named_tensors():
            where, shape = f"{type(self).__name__}.{name}", tuple(tensor.shape)
            if spec == "host":
                raise ValueError(f'{where} is a tensor, and declared leaf("host"); write another leaf, or a number')
            if shape[: len(begins[spec])] != begins[spec]:
                text = f'{where} has shape {shape}, which does not begin with {begins[spec]}, as leaf("{spec}") does'
                raise ValueError(f"{text} with weights of shape {tuple(self.weights.shape)}")
        if self.weights.dtype != torch.float32:
            raise ValueError(f"{type(self).__name__}.weights are {self.weights.dtype}; write float32")
