"""Model whose logits are bounded by a tanh (Gemma 2 and 4)."""

from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.components.model.decoder.model import CausalLM
from drawloom.components.model.layers import ChunkedHead
from drawloom.ports import Finish, Head, TokenContext


@attrs.define(eq=False)
class CappedHead(ChunkedHead):
    """Head whose logits are `cap` * tanh(logits / cap) for another head's logits, which `project` computes."""

    cap: float = 1.0

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.project(hidden)
        return self.cap * (logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.cap).tanh()


class CappedCausalLM(CausalLM):
    """Span of a model whose logits are bounded by the config's `final_logit_softcapping`, unless it is None."""

    def forward(self, inputs: Tensor, shared: TokenContext, finish: Finish | None = None) -> Any:
        """Apply `CausalLM`, with bounded logits, to inputs (rows, length) or hidden states (rows, length, width)."""
        architecture: Any = self.model.architecture
        size, cap = architecture.vocab_size, architecture.final_logit_softcapping
        if finish is None or cap is None:
            return super().forward(inputs, shared, finish)

        def finish_with_cap(hidden: Tensor, head: Head) -> Any:
            return finish(hidden, CappedHead(head.logits, size, cap=cap))

        return super().forward(inputs, shared, finish_with_cap)
