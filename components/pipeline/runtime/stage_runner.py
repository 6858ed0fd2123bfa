"""What a stage does with a microbatch: forward, and backward as a whole or in two parts."""

from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.components.pipeline.split_backward.split_backward import SplitBackward
from drawloom.components.pipeline.state.handler import PipelineStateHandler
from drawloom.components.ports.data import Batch
from drawloom.components.ports.model import BatchContext, Stage
from drawloom.components.ports.pipeline import Loss
from drawloom.components.storage.pytree import leaves, transform


@attrs.define(eq=False)
class InFlight:
    """What lives between a forward and its backward: the floating leaves that the stage took and gave."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    split: SplitBackward | None


@attrs.define(eq=False)
class StageRunner:
    """
    One stage at work on the microbatches of a step; if it is `split`, it goes backward in two parts.

    Every floating leaf of what passes between stages is differentiable: a gradient goes back for each, zeros where
    nobody asked for it, so that both sides know what travels without asking.
    """

    stage: Stage
    objective: Loss
    state: PipelineStateHandler
    split: bool = False
    _live: dict[int, InFlight] = attrs.field(factory=dict)

    @property
    def last(self) -> bool:
        """Whether this stage's output is the model's."""
        return self.stage.index == self.stage.count - 1

    def forward(self, microbatch: int, taken: Any, shared: BatchContext, batch: Batch | None) -> Any:
        """Run the stage; what it gave, cut from its graph. Without a batch there is no loss."""
        if not self.split:
            split, given = None, self._run(microbatch, taken, shared, batch)
        else:
            split = SplitBackward()
            with split.forward():
                given = self._run(microbatch, taken, shared, batch)
        if torch.is_grad_enabled():
            self._live[microbatch] = InFlight(floating(leaves(taken)), floating(leaves(given)), split)
        return transform(detach, given)

    def _run(self, microbatch: int, taken: Any, shared: BatchContext, batch: Batch | None) -> Any:
        given = self.stage.module(taken, shared)
        return self._loss(microbatch, given, batch) if self.last and batch is not None else given

    def _loss(self, microbatch: int, output: Any, batch: Batch) -> Tensor:
        loss, weight = self.objective.loss(output, batch)
        mine = self.state.sharded_state(microbatch)
        mine["loss"], mine["weight"] = loss, weight
        return loss

    def backward(self, microbatch: int, grads: list[Tensor] | None) -> list[Tensor]:
        """Both parts at once; the gradient of each floating leaf that the stage took. No `grads` mean a loss."""
        live = self._live.pop(microbatch)
        pairs = [pair for pair in zip(live.outputs, grads or _ones(live.outputs), strict=True) if pair[0].requires_grad]
        if pairs:
            torch.autograd.backward([leaf for leaf, _ in pairs], [grad for _, grad in pairs])
        return [_or_zeros(leaf, leaf.grad) for leaf in live.inputs]

    def backward_input(self, microbatch: int, grads: list[Tensor] | None) -> list[Tensor]:
        """The part that the stage before waits for."""
        live = self._live[microbatch]
        found = _split(live).backward_input(live.outputs, grads or _ones(live.outputs), live.inputs)
        back = [_or_zeros(leaf, grad) for leaf, grad in zip(live.inputs, found, strict=True)]
        live.inputs, live.outputs = [], []
        return back

    def backward_weight(self, microbatch: int) -> None:
        """The part that nobody waits for."""
        _split(self._live.pop(microbatch)).backward_weight()


def _split(live: InFlight) -> SplitBackward:
    if live.split is None:
        raise ValueError("this stage goes backward as a whole")
    return live.split


def _ones(losses: list[Tensor]) -> list[Tensor]:
    """The gradients of losses."""
    return [torch.ones_like(loss) for loss in losses]


def floating(tree_leaves: list[Any]) -> list[Tensor]:
    """The leaves that have gradients: of floating-point numbers, real or complex."""
    return [leaf for leaf in tree_leaves if _floats(leaf)]


def _floats(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def detach(leaf: Any) -> Any:
    """A leaf without its graph."""
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def as_input(tree: Any) -> Any:
    """What a stage before gave, as the start of a graph of its own."""
    return transform(lambda leaf: leaf.requires_grad_() if _floats(leaf) else leaf, tree)


def _or_zeros(leaf: Tensor, grad: Tensor | None) -> Tensor:
    return torch.zeros_like(leaf) if grad is None else grad
