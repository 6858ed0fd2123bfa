"""
New tokens: the rows of some token ids, of embedding and head, as parameters of their own.

They can then be trained alone, while the table that a folder has stays frozen, and are one table with it in files.
"""

from collections.abc import Sequence
from functools import partial

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.model.layers import ChunkedHead, Embedding, Linear
from drawloom.components.ports.model import Head
from drawloom.components.ports.weights import Mapper, TensorGroup

NEW = "new_tokens"
"""The name of the parameter with the rows of new tokens, in the embedding and in the head."""


@attrs.frozen
class Split:
    """
    Token ids from `first` to before `end` have rows of their own, beside a table of `rows` rows.

    The table may have rows for them, too, which are not used, or may end before them.
    """

    first: int
    end: int
    rows: int

    @property
    def size(self) -> int:
        """The number of token ids."""
        return max(self.rows, self.end)

    def joined(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """One table (size, hidden_size) of the table (rows, hidden_size) and the new rows (new, hidden_size)."""
        table, new = tensors
        return [torch.cat([table[: self.first], new, table[self.end :]])]

    def parted(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """
        The table (rows, hidden_size) and the new rows of a table (rows, hidden_size).

        New rows that it does not have are the mean of those before them, so that they begin as likely as others.
        """
        (table,) = tensors
        known = table[self.first : self.end]
        mean = table[: self.first].to(torch.promote_types(table.dtype, torch.float32)).mean(0, keepdim=True)
        missing = mean.to(table.dtype).expand(self.end - self.first - len(known), -1)
        return [table, torch.cat([known, missing])]


class PartedEmbedding(Embedding):
    """An embedding with a table, `weight` (rows, hidden_size), and `new_tokens` (new, hidden_size)."""

    def __init__(self, base: Embedding, split: Split) -> None:
        rows, width = base.weight.shape
        super().__init__(rows, width, base.kernels)
        self.weight, self.split = base.weight, split
        self.new_tokens = nn.Parameter(torch.empty(split.end - split.first, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids, int64 (...), to vectors (..., hidden_size) of the weight's dtype."""
        new = (tokens >= self.split.first) & (tokens < self.split.end)
        table = self.kernels.embedding(tokens.masked_fill(new, 0), self.weight)
        own = self.kernels.embedding((tokens - self.split.first).masked_fill(~new, 0), self.new_tokens)
        return torch.where(new[..., None], own.to(table.dtype), table)

    def head(self) -> Head:
        """The head that is tied to the layer."""
        return ChunkedHead(partial(_logits, self), self.split.size)


class PartedHead(Linear):
    """A head with a table, `weight` (rows, hidden_size), and `new_tokens` (new, hidden_size)."""

    def __init__(self, base: Linear, split: Split) -> None:
        rows, width = base.weight.shape
        super().__init__(width, rows, base.kernels)
        self.weight, self.split = base.weight, split
        self.new_tokens = nn.Parameter(torch.empty(split.end - split.first, width))

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
    new = layer.kernels.linear(hidden.to(layer.new_tokens.dtype), layer.new_tokens).to(table.dtype)
    return torch.cat([table[..., : layer.split.first], new, table[..., layer.split.end :]], -1)


def part(module: nn.Module, split: Split) -> nn.Module:
    """A module whose embeddings and heads, which have as many rows as the split's table, get rows for new tokens."""
    for name, layer in list(module.named_modules()):
        owner, _, leaf = name.rpartition(".")
        if type(layer) is Embedding:
            setattr(module.get_submodule(owner), leaf, PartedEmbedding(layer, split))
        elif leaf == "lm_head" and type(layer) is Linear:
            setattr(module.get_submodule(owner), leaf, PartedHead(layer, split))
    return module


def join_mapper(names: Sequence[str], split: Split) -> Mapper:
    """Maps tables and new rows, of the parameters of these names, to one table each."""
    layers = [name.removesuffix(NEW) for name in names if name.endswith(f".{NEW}")]
    groups = [
        TensorGroup((f"{layer}weight", f"{layer}{NEW}"), (f"{layer}weight",), split.joined, split.parted)
        for layer in layers
    ]
    return Mapper(tuple(groups))
