"""Floating-point operations (FLOPs) of a model, and ports for components that count them."""

from collections.abc import Collection, Mapping
from typing import Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor

from drawloom.graph import port


@attrs.frozen
class ForwardFlops:
    """
    Floating-point operations for matrix products in a forward pass; a multiply-add counts as two.

    `by_parameter` has the operations for one token by parameter; for experts, only those that the token visits.
    `per_pair` has the attention operations per query and visible key, by layer window; the key None is for layers
    without a window. `per_token` are other operations for one token, such as products with the states of recurrent
    layers.
    """

    by_parameter: Mapping[str, float]
    per_pair: Mapping[int | None, float]
    per_token: float = 0.0

    def count_training_flops(
        self, tokens: float, pairs: Mapping[int | None, float], frozen: Collection[str] = ()
    ) -> float:
        """
        Return the operations in a forward and a backward pass over `tokens` tokens and `pairs` attended pairs by
        window.

        A backward pass has two products per forward product, or one if the parameter is frozen.
        Activation checkpointing's recomputation does not count (Chowdhery et al. 2022, "PaLM", arXiv 2204.02311,
        appendix B).
        """
        products = sum(flops * (2 if name in frozen else 3) for name, flops in self.by_parameter.items())
        attention = sum(flops * pairs[window] for window, flops in self.per_pair.items())
        return tokens * (products + 3 * self.per_token) + 3 * attention


@port
class CountsFlops(Protocol):
    """A model that counts its floating-point operations."""

    def forward_flops(self) -> ForwardFlops:
        """Return the operations in the whole model's forward pass, including its head."""
        ...


@runtime_checkable
class UpdateFlops(Protocol):
    """An optimizer with matrix products in its update."""

    def count_update_flops(self) -> float:
        """Return the floating-point operations per update on this rank, in bfloat16; works before `open`."""
        ...


@runtime_checkable
class UpdateArithmetic(Protocol):
    """An optimizer whose update takes longer than its memory traffic."""

    def count_elementwise_flops_per_update(self) -> float:
        """Return the float32 operations per update on this rank, without matrix products; works before `open`."""
        ...


def count_attended_pairs(document_ids: Tensor, window: int | None = None) -> int:
    """
    Count query-key pairs in causal attention inside documents, with at most `window` keys per query.

    document_ids: int64 (rows, length); a document's tokens are consecutive.
    """
    length = document_ids.shape[1]
    positions = torch.arange(length).expand_as(document_ids)
    is_start = torch.ones_like(document_ids, dtype=torch.bool)
    is_start[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    starts = positions.where(is_start, 0).cummax(1).values if length else positions
    visible_keys = positions - starts + 1
    return int(visible_keys.clamp(max=length if window is None else window).sum())
