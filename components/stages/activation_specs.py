"""Input activations' shapes and dtypes by stage, computed on the meta device."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.state.trees import list_leaves, map_leaves
from drawloom.ports import BatchContext, LayerRange

Key = tuple[Any, ...]


@attrs.define(eq=False)
class ActivationSpecs:
    """
    Input tensor trees by stage, for microbatches with any shape. `build` makes a span's module on the meta device. A
    module is built once, and a shape runs through it once; if all layers keep their inputs' shapes
    (`layers_keep_shapes`), only the first layer runs.
    """

    spans: Sequence[LayerRange]
    build: Callable[[LayerRange], nn.Module]
    layers_keep_shapes: bool = False
    _modules: dict[LayerRange, nn.Module] = attrs.field(factory=dict)
    _specs: dict[Key, Any] = attrs.field(factory=dict)

    def infer_stage_inputs(self, stage: int, inputs: Any, shared: BatchContext) -> Any:
        """
        Return a stage's inputs for a microbatch with these inputs: a meta tensor tree, with other leaves unchanged.
        """
        # Values can't matter on the meta device, so inputs of the same shapes and dtypes have one tree.
        key = (stage, _list_shapes_and_dtypes(inputs), shared.hidden_states)
        if key not in self._specs:
            self._specs[key] = self._run_previous_stage_on_meta(stage, inputs, shared)
        return self._specs[key]

    def _run_previous_stage_on_meta(self, stage: int, inputs: Any, shared: BatchContext) -> Any:
        """Run the previous stage on the meta device, and return its output as this stage's inputs."""
        if stage == 0:
            return copy_tree_to_meta(inputs)
        previous, span = self.infer_stage_inputs(stage - 1, inputs, shared), self.spans[stage - 1]
        # Requested hidden states pass through all later stages, so that every stage returns something different.
        if self.layers_keep_shapes and not shared.hidden_states:
            if stage > 1 and self.spans[stage - 2].last > self.spans[stage - 2].first:  # it has layers
                return previous
            span = attrs.evolve(span, last=min(span.last, span.first + 1))
        # Without a cache, because the pass would extend it.
        with torch.no_grad():
            if span not in self._modules:
                self._modules[span] = self.build(span)
            return copy_tree_to_meta(self._modules[span](previous, copy_tree_to_meta(attrs.evolve(shared, cache=None))))


def _list_shapes_and_dtypes(tree: Any) -> Key:
    """Return a tree's tensor shapes and dtypes."""
    if isinstance(tree, Tensor):  # a fast path for token ids, because it runs for every microbatch
        return tree.shape, tree.dtype
    return tuple((leaf.shape, leaf.dtype) for leaf in list_leaves(tree) if isinstance(leaf, Tensor))


def copy_tree_to_meta(tree: Any) -> Any:
    """Return the tree with contiguous tensors on the meta device instead of its tensors."""
    return map_leaves(lambda leaf: torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf, tree)
