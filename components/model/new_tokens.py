"""The setting `new_tokens`: token ids with separate rows in embedding and head."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.components.model.decoder.config import MAX_SIZES

NewTokens = int | dict[str, int]
"""Number of the last token ids with separate rows, or a table from parameter names to such numbers."""

NEW = "new_tokens"
"""Name of the parameter if `new_tokens` is a number."""


def count_new_rows(new_tokens: NewTokens) -> dict[str, int]:
    """Return a setting `new_tokens` as a table: the number of rows by parameter name, in token id order."""
    if isinstance(new_tokens, int):
        return {NEW: new_tokens} if new_tokens else {}
    return new_tokens


def count_new_tokens(new_tokens: NewTokens) -> int:
    """Return the number of rows in all splits."""
    return sum(count_new_rows(new_tokens).values())


def find_new_tokens_fault(value: Any) -> str | None:
    """Return why a setting `new_tokens` is invalid, or None if it is valid."""
    maximum = MAX_SIZES["vocab_size"]
    if isinstance(value, int):
        return None if 0 <= value <= maximum else f"{value} is not from 0 to {maximum}"
    from drawloom.components.model.layers import Embedding, Linear

    kernels: Any = None
    with torch.device("meta"):
        layers = Embedding(1, 1, kernels), Linear(1, 1, kernels)
    for name, size in value.items():
        if not name.isidentifier() or name == "split" or any(hasattr(layer, name) for layer in layers):
            return f"{name!r} can't be the name of a parameter of embedding and head; write another, such as {NEW}"
        if not 1 <= size <= maximum:
            return f"{name} = {size} is not from 1 to {maximum}"
    return None


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
        mean = table[: self.first].to(torch.promote_types(table.dtype, torch.float32)).mean(0, keepdim=True)
        missing = mean.to(table.dtype).expand(self.id_after_new_tokens - self.first - len(known), -1)
        return [table, *torch.split(torch.cat([known, missing]), [*self.sizes.values()])]
