"""The floating-point operations that a model needs, and the port of models that know them."""

from collections.abc import Collection, Mapping
from typing import Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor

from drawloom.graph import port


@attrs.frozen
class ForwardFlops:
    """
    Floating-point operations of matrix products in a forward pass: an addition and a multiplication are two.

    `by_parameter` are those of one token, by the parameter that it is multiplied by; of experts, those that it visits.
    `per_pair` are those of attention for a query and a key that it sees, by the window of layers, None without one.
    """

    by_parameter: Mapping[str, float]
    per_pair: Mapping[int | None, float]

    def of_training(self, tokens: float, pairs: Mapping[int | None, float], frozen: Collection[str] = ()) -> float:
        """
        Those of a forward and a backward pass over `tokens`; `pairs` are of a query and a key that it sees, by window.

        A backward pass has two products for each of the forward pass, of which frozen parameters need one. What is
        computed again does not count (Chowdhery et al. 2022, "PaLM", arXiv 2204.02311, appendix B).
        """
        products = sum(flops * (2 if name in frozen else 3) for name, flops in self.by_parameter.items())
        return tokens * products + 3 * sum(flops * pairs[window] for window, flops in self.per_pair.items())


@port
class CountsFlops(Protocol):
    """A model that knows its floating-point operations."""

    def forward_flops(self) -> ForwardFlops:
        """Those of a forward pass of the whole model, its head included."""
        ...


@runtime_checkable
class UpdateFlops(Protocol):
    """An optimizer whose update has matrix products."""

    def update_flops(self) -> float:
        """Floating-point operations of them on this rank, in bfloat16; that needs no `open`."""
        ...


def attended_pairs(document_ids: Tensor, window: int | None = None) -> int:
    """
    How many keys all queries of some rows see together: causally, inside of documents, and at most `window` each.

    document_ids: int64 (rows, length); the tokens of a document are next to one another.
    """
    length = document_ids.shape[1]
    places = torch.arange(length).expand_as(document_ids)
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    firsts = places.where(begins, 0).cummax(1).values if length else places
    seen = places - firsts + 1
    return int(seen.clamp(max=length if window is None else window).sum())
