"""Key-value cache for attention: forward passes compute only new tokens."""

from typing import NamedTuple

import torch
from torch import Tensor


class CachedKeys(NamedTuple):
    """
    A layer's keys (rows, keys, kv_heads, head_dim) and values (rows, keys, kv_heads, v_dim), with the new tokens' last.

    With `key_count`, int64 () on their device, they have `capacity` entries; only the first `key_count` are tokens.
    """

    keys: Tensor
    values: Tensor
    key_count: Tensor | None = None


class KeyValueCache:
    """
    Keys and values for all earlier tokens, by layer on this rank, for rows that contain one document.

    The BatchContext for a pass over new tokens, with positions from `length` on, contains the cache. A model passes it
    to `Kernels.attention_mask`; every layer's `Kernels.attention` then extends it, always in the first pass's layer
    order. Recurrent operations keep their states instead, also in order. `end_pass` ends a pass. A pass between
    `begin_fixed_pass` and `end_pass` can be recorded as a CUDA graph.
    """

    # Not an attrs class: a forward pass walks the trees of its inputs, in which a cache must be a leaf.
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.next_layer = 0
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._bounds: Tensor | None = None  # this pass's position and its count of tokens, for fixed passes
        self._is_fixed = False
        self._states: list[Tensor | None] = []
        self._next_state = 0

    @property
    def cached_layer_count(self) -> int:
        """Number of layers and recurrent operations with cached tensors; 0 if the model does not use a cache."""
        return len(self._layers) + len(self._states)

    @property
    def has_states(self) -> bool:
        """Whether a recurrent operation has a state."""
        return bool(self._states)

    def begin_fixed_pass(self, device: torch.device) -> None:
        """
        Begin a pass over one new token per row; all such passes have the same shapes and addresses on `device`.

        Raises ValueError if the cache is full, or if there was no pass before.
        """
        if not self._layers or self.length == self.capacity:
            raise ValueError(f"no token can follow {self.length} cached tokens with a capacity of {self.capacity}")
        if self._bounds is None:
            self._bounds = torch.empty(2, dtype=torch.int64, device=device)
        self._bounds[0].fill_(self.length)
        self._bounds[1].fill_(self.length + 1)
        self._is_fixed = True

    def extend(self, k: Tensor, v: Tensor) -> CachedKeys:
        """
        Append new tokens' keys and values for the next layer, and return all its keys and values.

        k (rows, new, kv_heads, head_dim), v (rows, new, kv_heads, v_dim). Raises ValueError for more than `capacity`
        tokens.
        """
        end = self.length + k.shape[1]
        if end > self.capacity:
            raise ValueError(f"{end} tokens do not fit into a cache of {self.capacity}")
        if self.next_layer == len(self._layers):
            # Zeros, because a fixed pass multiplies values behind the last token by weights of 0.
            new = [x.new_zeros(x.shape[0], self.capacity, *x.shape[2:]) for x in (k, v)]
            self._layers.append((new[0], new[1]))
        keys, values = self._layers[self.next_layer]
        self.next_layer += 1
        if self._is_fixed and self._bounds is not None:
            keys.index_copy_(1, self._bounds[:1], k)
            values.index_copy_(1, self._bounds[:1], v)
            return CachedKeys(keys, values, self._bounds[1])
        keys[:, self.length : end], values[:, self.length : end] = k, v
        return CachedKeys(keys[:, :end], values[:, :end])

    def read_next_state(self) -> Tensor | None:
        """
        Return the state (any shape) that the next recurrent operation had after earlier tokens; None in the first pass.
        """
        if self._next_state == len(self._states):
            self._states.append(None)
        self._next_state += 1
        return self._states[self._next_state - 1]

    def replace_last_read_state(self, state: Tensor) -> None:
        """Store a state (any shape) for the operation whose `read_next_state` was last."""
        self._states[self._next_state - 1] = state

    def end_pass(self, tokens: int) -> None:
        """End a forward pass over `tokens` new tokens: the next `extend` is for the first layer again."""
        self.length += tokens
        self.next_layer = self._next_state = 0
        self._is_fixed = False
