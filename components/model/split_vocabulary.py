"""
Vocabulary splits: separate parameters for some token ids' rows in embedding and head.

The rows can be trained while a pretrained model's table stays frozen. In files, table and rows are one tensor.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.model.layers import ChunkedHead, Embedding, Linear, at_least_float32
from drawloom.ports import TABLE_ROLE, Head, Mapper, Role, TensorGroup

LAYERS = ("embed_tokens", "embed_tokens_per_layer", "lm_head")


@attrs.frozen
class NewTokenSplit:
    """
    Vocabulary split: token ids from `first` on have separate rows, the others a table with `rows` rows.

    `sizes` maps parameter names to counts of consecutive ids, in id order. The table may contain unused rows for these
    ids, or end before them.
    """

    first: int
    sizes: Mapping[str, int]
    rows: int

    @property
    def id_after_new_tokens(self) -> int:
        """The id after the last one with a separate row."""
        return self.first + sum(self.sizes.values())

    @property
    def id_count(self) -> int:
        """The number of token ids."""
        return max(self.rows, self.id_after_new_tokens)

    def new_id_ranges(self) -> Iterator[tuple[str, range]]:
        """Yield every parameter name in `sizes` with its new ids."""
        ends = accumulate(self.sizes.values(), initial=self.first)
        yield from ((name, range(end, end + size)) for (name, size), end in zip(self.sizes.items(), ends, strict=False))

    def join_rows(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Join the table (rows, hidden_size) and the separate rows to one table (size, hidden_size)."""
        table, *new = tensors
        return [torch.cat([table[: self.first], *new, table[self.id_after_new_tokens :]])]

    def split_rows(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """
        Return the table (rows, hidden_size) and copies of its rows for the separate parameters.

        Missing rows become the mean of the rows before `first`, so that new tokens begin as likely as others.
        """
        (table,) = tensors
        known = table[self.first : self.id_after_new_tokens]
        mean = table[: self.first].to(at_least_float32(table)).mean(0, keepdim=True)
        missing = mean.to(table.dtype).expand(self.id_after_new_tokens - self.first - len(known), -1)
        return [table, *torch.split(torch.cat([known, missing]), [*self.sizes.values()])]

    def replace_layers(self, module: nn.Module) -> nn.Module:
        """
        Change the classes of a module's embeddings and heads to split ones, and register the separate rows' parameters.

        Their weights keep `rows` rows. Returns the module.
        """
        for name, layer in module.named_modules():
            if type(layer) is Embedding:
                layer.__class__ = SplitEmbedding
            elif name.rpartition(".")[2] == "lm_head" and type(layer) is Linear:
                layer.__class__ = SplitHead
            if isinstance(layer, SplitEmbedding | SplitHead):
                layer.split = self
                for parameter, size in self.sizes.items():
                    layer.register_parameter(parameter, nn.Parameter(torch.empty(size, layer.weight.shape[1])))
        return module

    def create_join_mapper(self, names: Iterable[str]) -> Mapper:
        """
        Return a mapper that joins the tables and separate rows of all embeddings and heads among the parameter names.
        """
        layers = [name.removesuffix(".weight") for name in names]
        groups = [
            TensorGroup(
                (f"{layer}.weight", *(f"{layer}.{name}" for name in self.sizes)),
                (f"{layer}.weight",),
                self.join_rows,
                self.split_rows,
            )
            for layer in layers
            if layer.rpartition(".")[2] in LAYERS
        ]
        return Mapper(tuple(groups))


class SplitEmbedding(Embedding):
    """Embedding with a table `weight` (rows, hidden_size), and a parameter (ids, hidden_size) per name in the split."""

    split: NewTokenSplit

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids, int64 (...), to vectors (..., hidden_size) in the weight's dtype."""
        is_new = (tokens >= self.split.first) & (tokens < self.split.id_after_new_tokens)
        vectors = self.kernels.embedding(tokens.masked_fill(is_new, 0), self.weight)
        for name, ids in self.split.new_id_ranges():
            is_in_range = (tokens >= ids.start) & (tokens < ids.stop)
            rows = self.kernels.embedding((tokens - ids.start).masked_fill(~is_in_range, 0), self.get_parameter(name))
            vectors = torch.where(is_in_range[..., None], rows.to(vectors.dtype), vectors)
        return vectors

    def head(self) -> Head:
        """Return the head tied to the layer."""
        return ChunkedHead(partial(_compute_all_logits, self), self.split.id_count)

    def parameter_roles(self) -> Mapping[str, Role]:
        return dict.fromkeys(("weight", *self.split.sizes), TABLE_ROLE)


class SplitHead(Linear):
    """Head with a table `weight` (rows, hidden_size), and a parameter (ids, hidden_size) per name in the split."""

    split: NewTokenSplit

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., hidden_size), of any floating dtype, to logits (..., size) in the weight's dtype."""
        return _compute_all_logits(self, x)

    def head(self) -> Head:
        """Return the layer as a model's head."""
        return ChunkedHead(self, self.split.id_count)


def _compute_all_logits(layer: SplitEmbedding | SplitHead, hidden: Tensor) -> Tensor:
    """Return logits (..., size), in id order and the table's dtype, for hidden (..., hidden_size)."""
    # The products use whole weights, not slices, so that weight gradients can be deferred.
    table = layer.kernels.linear(hidden.to(layer.weight.dtype), layer.weight)
    rows = (layer.get_parameter(name) for name in layer.split.sizes)
    new = [layer.kernels.linear(hidden.to(weight.dtype), weight).to(table.dtype) for weight in rows]
    return torch.cat([table[..., : layer.split.first], *new, table[..., layer.split.id_after_new_tokens :]], -1)
