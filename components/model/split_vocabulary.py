"""
Splits of the vocabulary: the rows of some token ids, of embedding and head, as parameters of their own.

They can then be trained alone, while the table that a folder has stays frozen, and are one table with it in files.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.model.decoder.config import MAX_SIZES
from drawloom.components.model.layers import ChunkedHead, Embedding, Linear
from drawloom.components.ports.model import Head
from drawloom.components.ports.weights import Mapper, TensorGroup

NewTokens = int | dict[str, int]
"""How many of the last token ids have rows of their own, or how many by the name of the parameter with these rows."""

NEW = "new_tokens"
"""The name of the parameter if a number alone is given."""

LAYERS = ("embed_tokens", "lm_head")


def split_sizes(new_tokens: NewTokens) -> dict[str, int]:
    """Return the number of rows of each split, by name, in the order of token ids."""
    if isinstance(new_tokens, int):
        return {NEW: new_tokens} if new_tokens else {}
    return new_tokens


def count_new_tokens(new_tokens: NewTokens) -> int:
    """Return the number of rows of all splits."""
    return sum(split_sizes(new_tokens).values())


def fault_of_new_tokens(value: Any) -> str | None:
    """Return why a setting `new_tokens` is invalid, None if it is valid."""
    most = MAX_SIZES["vocab_size"]
    if isinstance(value, int):
        return None if 0 <= value <= most else f"{value} is not from 0 to {most}"
    kernels: Any = None
    with torch.device("meta"):
        layers = Embedding(1, 1, kernels), Linear(1, 1, kernels)
    for name, size in value.items():
        if not name.isidentifier() or name == "split" or any(hasattr(layer, name) for layer in layers):
            return f"{name!r} can't be the name of a parameter of embedding and head; write another, such as {NEW}"
        if not 1 <= size <= most:
            return f"{name} = {size} is not from 1 to {most}"
    return None


@attrs.frozen
class Split:
    """
    Token ids from `first` on have rows of their own, beside a table of `rows` rows: consecutive ids of each name.

    `sizes` has the number of ids by name, in order. The table may have rows for them, too, which are not used, or may
    end before them.
    """

    first: int
    sizes: Mapping[str, int]
    rows: int

    @property
    def end(self) -> int:
        """The id after the last one with a row of its own."""
        return self.first + sum(self.sizes.values())

    @property
    def size(self) -> int:
        """The number of token ids."""
        return max(self.rows, self.end)

    def ranges(self) -> Iterator[tuple[str, int, int]]:
        """Yield each name with its first id and the id after its last one."""
        ends = accumulate(self.sizes.values(), initial=self.first)
        yield from ((name, end, end + size) for (name, size), end in zip(self.sizes.items(), ends, strict=False))

    def joined(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return one table (size, hidden_size) of the table (rows, hidden_size) and the rows of each split."""
        table, *new = tensors
        return [torch.cat([table[: self.first], *new, table[self.end :]])]

    def parted(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """
        Return the table (rows, hidden_size) and the rows of each split of a table (rows, hidden_size).

        Rows that it does not have are the mean of those before the splits, so that they begin as likely as others.
        """
        (table,) = tensors
        known = table[self.first : self.end]
        mean = table[: self.first].to(torch.promote_types(table.dtype, torch.float32)).mean(0, keepdim=True)
        missing = mean.to(table.dtype).expand(self.end - self.first - len(known), -1)
        return [table, *torch.split(torch.cat([known, missing]), [*self.sizes.values()])]


def _add_rows(layer: nn.Module, split: Split, width: int) -> None:
    for name, size in split.sizes.items():
        layer.register_parameter(name, nn.Parameter(torch.empty(size, width)))


class PartedEmbedding(Embedding):
    """An embedding with a table, `weight` (rows, hidden_size), and a parameter (ids, hidden_size) of each split."""

    def __init__(self, base: Embedding, split: Split) -> None:
        rows, width = base.weight.shape
        super().__init__(rows, width, base.kernels)
        self.weight, self.split = base.weight, split
        _add_rows(self, split, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids, int64 (...), to vectors (..., hidden_size) of the weight's dtype."""
        new = (tokens >= self.split.first) & (tokens < self.split.end)
        vectors = self.kernels.embedding(tokens.masked_fill(new, 0), self.weight)
        for name, first, end in self.split.ranges():
            mine = (tokens >= first) & (tokens < end)
            own = self.kernels.embedding((tokens - first).masked_fill(~mine, 0), self.get_parameter(name))
            vectors = torch.where(mine[..., None], own.to(vectors.dtype), vectors)
        return vectors

    def head(self) -> Head:
        """The head that is tied to the layer."""
        return ChunkedHead(partial(_logits, self), self.split.size)


class PartedHead(Linear):
    """A head with a table, `weight` (rows, hidden_size), and a parameter (ids, hidden_size) of each split."""

    def __init__(self, base: Linear, split: Split) -> None:
        rows, width = base.weight.shape
        super().__init__(width, rows, base.kernels)
        self.weight, self.split = base.weight, split
        _add_rows(self, split, width)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden_size), of any floating dtype, to (..., size), in the weight's dtype."""
        return _logits(self, x)

    def head(self) -> Head:
        """The layer as the head of a model."""
        return ChunkedHead(self, self.split.size)


def _logits(layer: PartedEmbedding | PartedHead, hidden: Tensor) -> Tensor:
    """(..., hidden_size) to (..., size), in the dtype of the table."""
    # Whole weights are multiplied, and not slices, so that operations can put their gradients off.
    table = layer.kernels.linear(hidden.to(layer.weight.dtype), layer.weight)
    rows = (layer.get_parameter(name) for name in layer.split.sizes)
    new = [layer.kernels.linear(hidden.to(each.dtype), each).to(table.dtype) for each in rows]
    return torch.cat([table[..., : layer.split.first], *new, table[..., layer.split.end :]], -1)


def part(module: nn.Module, split: Split) -> nn.Module:
    """A module whose embeddings and heads, which have as many rows as the split's table, get rows of its splits."""
    for name, layer in list(module.named_modules()):
        owner, _, leaf = name.rpartition(".")
        if type(layer) is Embedding:
            setattr(module.get_submodule(owner), leaf, PartedEmbedding(layer, split))
        elif leaf == "lm_head" and type(layer) is Linear:
            setattr(module.get_submodule(owner), leaf, PartedHead(layer, split))
    return module


def join_mapper(names: Sequence[str], split: Split) -> Mapper:
    """Maps tables and rows of splits, of the parameters of these names, to one table each."""
    owners = (name.rpartition(".")[0] for name in names)
    layers = [owner for owner in dict.fromkeys(owners) if owner.rpartition(".")[2] in LAYERS]
    groups = [
        TensorGroup(
            (f"{layer}.weight", *(f"{layer}.{name}" for name in split.sizes)),
            (f"{layer}.weight",),
            split.joined,
            split.parted,
        )
        for layer in layers
    ]
    return Mapper(tuple(groups))
