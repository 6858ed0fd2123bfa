"""The key-value cache: what attention keeps of a text, so that a pass sees its new tokens only."""

from torch import Tensor


class KeyValueCache:
    """
    Keys and values of the tokens so far, of each layer of this rank's stages, for rows of one document.

    It is in the BatchContext of a pass over the new tokens, whose positions follow those of `length`. A model hands it
    to `Kernels.attention_mask`; each layer's `Kernels.attention` then extends it, in the order of the layers, which is
    that of the first pass. `advance` ends a pass.
    """

    # No attrs class: a pass walks the trees of its inputs, and a cache is a leaf.
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._next = 0

    @property
    def layers(self) -> int:
        """How many layers have extended it; 0 as well if a model makes no use of a cache."""
        return len(self._layers)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """
        Keys and values (rows, length + new, kv_heads, head_dim) of the next layer, from those of its new tokens.

        Raises ValueError if there are more than `capacity` tokens.
        """
        end = self.length + k.shape[1]
        if end > self.capacity:
            raise ValueError(f"{end} tokens do not fit into a cache of {self.capacity}")
        if self._next == len(self._layers):
            shape = (k.shape[0], self.capacity, *k.shape[2:])
            self._layers.append((k.new_empty(shape), v.new_empty(shape)))
        keys, values = self._layers[self._next]
        self._next += 1
        keys[:, self.length : end], values[:, self.length : end] = k, v
        return keys[:, :end], values[:, :end]

    def advance(self, tokens: int) -> None:
        """End a pass over this many new tokens: the next one begins at the first layer again."""
        self.length += tokens
        self._next = 0
