"""Port for the operations of recurrent layers, such as Qwen3.5's."""

from typing import Any, Protocol

from torch import Tensor

from drawloom.components.ports.cache import KeyValueCache
from drawloom.components.ports.experts import ExpertKernels
from drawloom.components.ports.model import Kernels, RowPart
from drawloom.graph import port


@port
class RecurrentKernels(Kernels, Protocol):
    """Operations for models with recurrent layers, whose states start at zero in every document."""

    def recurrence_mask(
        self, documents: Tensor, part: RowPart | None = None, cache: KeyValueCache | None = None
    ) -> Any:
        """
        Return the mask that recurrent operations take, made once for all layers in a microbatch.

        documents: int64 (rows, length); a token continues the state if the token before has the same number. With a
        `part`, `documents` covers this rank's tokens, and operations exchange states between ranks. With a cache, every
        row is one document, and operations continue the cached states.
        """
        ...

    def causal_conv(self, x: Tensor, weight: Tensor, mask: Any) -> Tensor:
        """
        Apply a causal convolution inside documents, channel by channel, and then SiLU.

        x (rows, length, channels), result like x; weight (channels, taps), whose last tap is for the token itself.
        """
        ...

    def gated_delta_rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, mask: Any) -> Tensor:
        """
        Compute S^T q for each token, where the state S becomes exp(g) S + beta k (v - exp(g) S^T k)^T.

        q and k: (rows, length, key_heads, K); v: (rows, length, value_heads, V); g, at most 0, and beta: (rows, length,
        value_heads); result like v. value_heads / key_heads consecutive value heads share a key head.
        """
        ...


@port
class HybridKernels(RecurrentKernels, ExpertKernels, Protocol):
    """Operations for models with both recurrent layers and experts."""
