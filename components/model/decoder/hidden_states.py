"""The hidden states that a forward pass gives besides the last ones, and how they travel from stage to stage."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.components.ports.model import BatchContext, HiddenStates


@attrs.define
class Collector:
    """
    Keeps hidden states of layers that are asked for.

    `inputs` are those of the span's first module; `kept` has what earlier spans have kept, and then this one. `whole`
    makes hidden states of whole rows of those that a layer gives.
    """

    inputs: Tensor
    documents: Tensor
    wanted: HiddenStates | None
    kept: dict[int, Tensor]
    whole: Callable[[Tensor], Tensor]

    @classmethod
    def of(
        cls, inputs: Any, shared: BatchContext, layers: int, whole: Callable[[Tensor], Tensor] = lambda hidden: hidden
    ) -> "Collector":
        """From what a span takes. Raises ValueError for a layer that a model of `layers` layers does not have."""
        wanted = shared.hidden_states
        if wanted is None:
            return cls(inputs, shared.document_ids, None, {}, whole)
        if unknown := [number for number in wanted.layers if not 0 <= number <= layers]:
            raise ValueError(f"there are no hidden states of layer {unknown[0]}: the model has layers 0 to {layers}")
        if shared.part is not None:
            raise ValueError("ranks along 'context' share rows out, and hidden states are of whole rows")
        hidden, kept = inputs if isinstance(inputs, tuple) else (inputs, {})
        return cls(hidden, shared.document_ids, wanted, dict(kept), whole)

    def add(self, layer: int, hidden: Tensor) -> None:
        """Keep what a layer gives, (rows, length, hidden_size), if it is asked for; a later call replaces it."""
        if self.wanted is not None and layer in self.wanted.layers:
            count, rows = self.wanted.documents, self.whole(hidden)
            self.kept[layer] = rows if count is None else means(rows, self.documents, count)

    def with_last(self, hidden: Tensor) -> Any:
        """What the span gives: hidden states (rows, length, hidden_size), in a pair with those that are kept."""
        return hidden if self.wanted is None else (hidden, self.kept)


def means(hidden: Tensor, documents: Tensor, count: int) -> Tensor:
    """
    Means over the tokens of each document: at least float32 (rows, count, hidden_size), zeros where there is none.

    hidden: (rows, length, hidden_size); documents: int64 (rows, length), of which those from `count` on are left out.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    numbers = torch.arange(count, device=documents.device)
    # A product and no scattered sum, so that the order of additions, and the result, is the same each time.
    members = (documents[:, None, :] == numbers[:, None]).to(dtype)
    return members @ hidden.to(dtype) / members.sum(-1, keepdim=True).clamp_min(1)
