"""Shapes and dtypes of the activations that each stage takes, found on the meta device."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.ports.model import BatchContext, LayerRange
from drawloom.components.state.trees import leaves, transform

Key = tuple[Any, ...]


@attrs.define(eq=False)
class ActivationSpecs:
    """
    The tree of tensors that each stage takes, for microbatches of any shape.

    `build` makes the module of a span on the meta device. Each module is built, and each shape run through it, once; of
    layers that all give what they take (`layers_keep_shapes`) only the first.
    """

    spans: Sequence[LayerRange]
    build: Callable[[LayerRange], nn.Module]
    layers_keep_shapes: bool = False
    _modules: dict[LayerRange, nn.Module] = attrs.field(factory=dict)
    _known: dict[Key, Any] = attrs.field(factory=dict)

    def of(self, stage: int, inputs: Any, shared: BatchContext) -> Any:
        """
        What a stage takes for a microbatch with these inputs: a tree of meta tensors, and other leaves as they are.
        """
        # Values can't matter on the meta device, so inputs of the same shapes and dtypes have one tree.
        key = (stage, _forms(inputs), shared.hidden_states)
        if key not in self._known:
            self._known[key] = self._find(stage, inputs, shared)
        return self._known[key]

    def _find(self, stage: int, inputs: Any, shared: BatchContext) -> Any:
        if stage == 0:
            return on_meta(inputs)
        before, span = self.of(stage - 1, inputs, shared), self.spans[stage - 1]
        # Hidden states that are asked for pass through all later stages, so there each stage gives something else.
        if self.layers_keep_shapes and not shared.hidden_states:
            if stage > 1 and _has_layers(self.spans[stage - 2]):
                return before
            span = attrs.evolve(span, last=min(span.last, span.first + 1))
        # No memory and no arithmetic: the module runs on the meta device, without a cache that it would extend.
        with torch.no_grad():
            return on_meta(self._module(span)(before, on_meta(attrs.evolve(shared, cache=None))))

    def _module(self, span: LayerRange) -> nn.Module:
        if span not in self._modules:
            self._modules[span] = self.build(span)
        return self._modules[span]


def _has_layers(span: LayerRange) -> bool:
    return span.last > span.first


def _forms(tree: Any) -> Key:
    """Return the shapes and dtypes of a tree's tensors."""
    if isinstance(tree, Tensor):  # token ids: a few microseconds matter there
        return tree.shape, tree.dtype
    return tuple((leaf.shape, leaf.dtype) for leaf in leaves(tree) if isinstance(leaf, Tensor))


def on_meta(tree: Any) -> Any:
    """The tree with its tensors replaced by contiguous ones on the meta device."""
    return transform(lambda leaf: torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf, tree)
