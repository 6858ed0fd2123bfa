"""Hooks of backward passes, called when a part's weight gradients are final."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drawloom.components.state.trees import list_leaves


def call_when_gradients_are_final(inputs: Any, function: Callable[[Tensor], None]) -> None:
    """
    Before a part's forward pass, hook its input: `function` is called once the input's gradient exists.

    Nothing is called without a backward pass for a tensor in `inputs`, a tree; leaves of the graph don't count.
    """
    if not torch.is_grad_enabled():
        return
    # Autograd adds the weight gradients of a part before it runs the node that made the part's input. A leaf, such as
    # the input of a stage, has no such node, and its hook may run before the last gradients are added.
    tensors = (leaf for leaf in list_leaves(inputs) if isinstance(leaf, Tensor) and leaf.grad_fn is not None)
    if (hidden := next(tensors, None)) is not None:
        hidden.register_hook(function)  # type: ignore[no-untyped-call]
