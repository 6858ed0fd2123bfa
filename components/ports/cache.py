"""Key-value cache for attention: forward passes compute only new tokens."""

from torch import Tensor


class KeyValueCache:
    """
    Keys and values for all earlier tokens, by layer on this rank, for rows that contain one document.

    The BatchContext for a pass over new tokens, with positions from `length` on, contains the cache. A model passes it
    to `Kernels.attention_mask`; every layer's `Kernels.attention` then extends it, always in the first pass's layer
    order. Recurrent operations keep their states instead, also in order. `end_pass` ends a pass.
    """

    # Not an attrs class: a forward pass walks the trees of its inputs, in which a cache must be a leaf.
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._next = 0
        self._states: list[Tensor | None] = []
        self._next_state = 0

    @property
    def layers(self) -> int:
        """Number of layers and recurrent operations with cached tensors; 0 if the model does not use a cache."""
        return len(self._layers) + len(self._states)

    @property
    def has_states(self) -> bool:
        """Whether a recurrent operation has a state."""
        return bool(self._states)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """
        Append new tokens' keys and values for the next layer, and return all its keys and values.

        Results are (rows, length + new, kv_heads, head_dim), for values v_dim. Raises ValueError for more than
        `capacity` tokens.
        """
        end = self.length + k.shape[1]
        if end > self.capacity:
            raise ValueError(f"{end} tokens do not fit into a cache of {self.capacity}")
        if self._next == len(self._layers):
            new = [x.new_empty(x.shape[0], self.capacity, *x.shape[2:]) for x in (k, v)]
            self._layers.append((new[0], new[1]))
        keys, values = self._layers[self._next]
        self._next += 1
        keys[:, self.length : end], values[:, self.length : end] = k, v
        return keys[:, :end], values[:, :end]

    def read_next_state(self) -> Tensor | None:
        """
        Return the state (any shape) that the next recurrent operation had after earlier tokens; None in the first pass.
        """
        if self._next_state == len(self._states):
            self._states.append(None)
        self._next_state += 1
        return self._states[self._next_state - 1]

    def write_state_read_last(self, state: Tensor) -> None:
        """Store a state (any shape) for the operation whose `read_next_state` was last."""
        self._states[self._next_state - 1] = state

    def end_pass(self, tokens: int) -> None:
        """End a forward pass over `tokens` new tokens: the next `extend` is for the first layer again."""
        self.length += tokens
        self._next = self._next_state = 0
