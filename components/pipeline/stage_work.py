"""What a stage does with a microbatch: forward, and backward as a whole or in two parts."""

from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.components.pipeline.split_backward import SplitBackward
from drawloom.components.pipeline.tree import leaves, transform
from drawloom.components.pipeline.weight_plan import StageWeights
from drawloom.components.ports.data import Batch
from drawloom.components.ports.model import Shared, Stage
from drawloom.components.ports.pipeline import Objective


@attrs.frozen(eq=False)
class Live:
    """What lives between a forward and its backward: what the stage took and gave, leaf by leaf."""

    taken: list[Any]
    given: list[Any]
    split: SplitBackward


@attrs.define(eq=False)
class StageWork:
    """
    One stage at work on the microbatches of a step.

    Every floating leaf of what passes between stages is differentiable: a gradient goes back for each, zeros where
    nobody asked for it, so that both sides know what travels without asking.
    """

    stage: Stage
    objective: Objective
    weights: StageWeights
    losses: dict[int, tuple[Tensor, Tensor]] = attrs.field(factory=dict)
    _live: dict[int, Live] = attrs.field(factory=dict)

    @property
    def last(self) -> bool:
        """Whether this stage's output is the model's."""
        return self.stage.index == self.stage.count - 1

    def forward(self, microbatch: int, taken: Any, shared: Shared, batch: Batch | None) -> Any:
        """Run the stage; what it gave, cut from its graph. Without a batch there is no loss: the output is what it gave."""
        split = SplitBackward(self.weights)
        with split.forward():
            given = self.stage.module(taken, shared)
            if self.last and batch is not None:
                given = self._loss(microbatch, given, batch)
        if torch.is_grad_enabled():
            self._live[microbatch] = Live(leaves(taken), leaves(given), split)
        return transform(cut, given)

    def _loss(self, microbatch: int, output: Any, batch: Batch) -> Tensor:
        loss, weight = self.objective.loss(output, batch)
        self.losses[microbatch] = loss.detach(), weight.detach()
        return loss

    def backward(self, microbatch: int, grads: list[Tensor] | None) -> list[Tensor]:
        """Both parts at once; the gradient of each floating leaf that the stage took. No `grads` mean a loss."""
        live = self._live.pop(microbatch)
        pairs = [(leaf, grad) for leaf, grad in self._roots(live, grads) if leaf.requires_grad]
        if pairs:
            torch.autograd.backward([leaf for leaf, _ in pairs], [grad for _, grad in pairs])
        return [_or_zeros(leaf, leaf.grad) for leaf in floating(live.taken)]

    def backward_input(self, microbatch: int, grads: list[Tensor] | None) -> list[Tensor]:
        """The part that the stage before waits for."""
        live = self._live[microbatch]
        roots = self._roots(live, grads)
        taken = floating(live.taken)
        found = live.split.backward_input([leaf for leaf, _ in roots], [grad for _, grad in roots], taken)
        self._live[microbatch] = Live([], [], live.split)
        return [_or_zeros(leaf, grad) for leaf, grad in zip(taken, found, strict=True)]

    def backward_weight(self, microbatch: int) -> None:
        """The part that nobody waits for."""
        self._live.pop(microbatch).split.backward_weight()

    def _roots(self, live: Live, grads: list[Tensor] | None) -> list[tuple[Tensor, Tensor]]:
        """Each floating leaf of the output with its gradient; a loss's is 1."""
        given = floating(live.given)
        return [*zip(given, [torch.ones_like(leaf) for leaf in given] if grads is None else grads, strict=True)]


def floating(tree_leaves: list[Any]) -> list[Tensor]:
    """The leaves that have gradients."""
    return [leaf for leaf in tree_leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def cut(leaf: Any) -> Any:
    """A leaf without its graph."""
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def as_input(tree: Any) -> Any:
    """What a stage before gave, as the start of a graph of its own."""
    return transform(
        lambda leaf: leaf.requires_grad_() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, tree
    )


def _or_zeros(leaf: Tensor, grad: Tensor | None) -> Tensor:
    return torch.zeros_like(leaf) if grad is None else grad
