"""Attention of transformers' models, computed by drawloom's kernels within documents."""

from typing import Any

from torch import Tensor, nn

from drawloom.components.model.fallback.parts import SelfCheckError
from drawloom.components.ports.model import Kernels, TokenContext
from drawloom.kernels.attention.options import AttentionOptions

NAME = "drawloom"
"""Name of the attention in transformers' registry, which has no entry for its masks, so that no mask is built."""


class RowAttention:
    """Attention within the documents of a microbatch; all layers share the masks of the same window."""

    def __init__(self, kernels: Kernels, shared: TokenContext) -> None:
        self.kernels = kernels
        self.shared = shared
        self.calls = 0
        self._masks: dict[int | None, Any] = {}

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, window: int | None, options: AttentionOptions, sinks: Tensor | None
    ) -> Tensor:
        """
        Return (rows, length, heads, v_dim).

        q: (rows, length, heads, head_dim); k: (rows, length, kv_heads, head_dim); v: (rows, length, kv_heads, v_dim);
        sinks: (heads,).
        """
        self.calls += 1
        return self.kernels.attention(q, k, v, self._get_or_create_mask(window), options, sinks)

    def _get_or_create_mask(self, window: int | None) -> Any:
        """Return the attention mask for a window, computed once per microbatch."""
        if window not in self._masks:
            shared = self.shared
            self._masks[window] = self.kernels.attention_mask(
                shared.document_ids, window, shared.part, shared.cache, shared.one_document_per_row
            )
        return self._masks[window]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *,
    documents: RowAttention | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """
    Return attention as (rows, length, heads, v_dim), with the signature of transformers' attention functions.

    Queries are (rows, heads, length, head_dim), keys (rows, kv_heads, length, head_dim), values (rows, kv_heads,
    length, v_dim), sinks (heads,). Raises SelfCheckError without the keyword `documents`.
    """
    if documents is None:
        raise SelfCheckError("keyword", f"{type(module).__name__} does not pass keywords on to attention")
    if attention_mask is not None:
        raise SelfCheckError("keyword", f"{type(module).__name__} has a mask of its own")
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    sinks = None if s_aux is None else s_aux.to(q.dtype)
    return documents.attend(q, k, v, sliding_window, AttentionOptions(scaling, softcap), sinks), None


def register_attention() -> None:
    """Register `attend` in transformers."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # takes seconds

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
