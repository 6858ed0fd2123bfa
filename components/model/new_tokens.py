"""The setting `new_tokens`: token ids with separate rows in embedding and head."""

from typing import Any

import torch

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
