"""Hooks of backward passes, called when a part's weight gradients are final."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drawloom.components.state.trees import list_leaves, map_leaves


def call_when_gradients_are_final(inputs: tuple[Any, ...], function: Callable[[Tensor], None]) -> tuple[Any, ...]:
    """
    Before a part's forward pass, return its inputs, trees, with a hook: `function` is called once the gradient of the
    first tensor with one exists, in a backward pass for it.
    """
    if not torch.is_grad_enabled():
        return inputs
    tensors = (leaf for leaf in list_leaves(inputs) if isinstance(leaf, Tensor) and leaf.requires_grad)
    if (hidden := next(tensors, None)) is None:
        return inputs
    # Autograd adds the weight gradients of a part before it runs the node that made the part's input. A leaf, such as
    # the input of a stage, has no such node, and its hook may run before the last gradients are added.
    made = hidden.view_as(hidden) if hidden.is_leaf else hidden
    made.register_hook(function)  # type: ignore[no-untyped-call]
    if made is hidden:
        return inputs
    return tuple(
        map_leaves(lambda leaf: made if leaf is hidden else leaf, value)
        if any(leaf is hidden for leaf in list_leaves(value))
        else value
        for value in inputs
    )
