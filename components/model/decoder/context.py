"""The context of a layer: positions, mask and weights of a microbatch, in the form that one layer needs."""

from typing import Any, NamedTuple

from torch import Tensor


class LayerContext(NamedTuple):
    """
    Inputs of a layer beside hidden states.

    `documents` are int64 (rows, length). `angles` are cos and sin, float32 (rows, length, pairs); None: the layer does
    not rotate. `mask` is the kernels' attention_mask of the microbatch, and `recurrence` their recurrence_mask.
    `weights`, float32 (rows, length), weight each token in losses inside of the layer; None disables them. `padding`,
    bool (rows, length), is true where there is no document's token; None without padding.
    """

    # A tuple, so that torch's compiler and tree functions see the tensors.
    documents: Tensor
    angles: tuple[Tensor, Tensor] | None = None
    mask: Any = None
    weights: Tensor | None = None
    padding: Tensor | None = None
    recurrence: Any = None
