"""A stage's passes for a microbatch: forward, and backward as a whole or in two parts."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.components.state.trees import list_leaves, map_leaves
from drawloom.kernels import deferred_grads
from drawloom.kernels.deferred_grads import Accumulation
from drawloom.kernels.recompute.policy import apply_recompute_policy
from drawloom.ports import LOSSES, Batch, BatchContext, Finish, Loss, Shards, Stage, StepState


@attrs.define(eq=False)
class InFlight:
    """
    Floating-point leaves of a stage's input and output, kept from the forward pass until the backward pass, with the
    SplitBackward if it is split.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    split: Any


@attrs.define(eq=False)
class StageRunner:
    """Runner for one stage on a step's microbatches: the port `RunnableStage`."""

    stage: Stage
    objective: Loss
    state: StepState = attrs.field(factory=StepState)
    split: bool = False
    _in_flight: dict[int, InFlight] = attrs.field(factory=dict)
    _reduces_next: bool = False
    _weights: Any = None  # accumulates weight gradients if the backward pass is split
    # whether this is the last stage, which has the head
    last: bool = attrs.field(
        init=False, default=attrs.Factory(lambda self: self.stage.index == self.stage.count - 1, takes_self=True)
    )

    # whether products add to weights' gradients themselves, as on GPUs
    _fuses_gradient_sums: bool = attrs.field(
        init=False,
        default=attrs.Factory(
            lambda self: any(
                weight.requires_grad and weight.device.type in deferred_grads.FUSED
                for weight in self.stage.module.parameters()
            ),
            takes_self=True,
        ),
    )

    def forward(
        self, microbatch: int, inputs: Any, shared: BatchContext, batch: Batch | None, finish: Finish | None = None
    ) -> Any:
        # Evaluation keeps nothing for a backward pass, so that activation checkpointing has no use.
        keeps = torch.is_grad_enabled()
        split = self._create_split_backward() if self.split else None
        recomputes = keeps and self.stage.recompute != "none"
        recomputing = apply_recompute_policy(self.stage.recompute, self.stage.blocks) if recomputes else nullcontext()
        accumulation = Accumulation() if self._fuses_gradient_sums else nullcontext()
        with accumulation if split is None else split.forward_context(), recomputing:
            if not self.last:
                outputs = self.stage.module(inputs, shared)
            elif batch is None:
                outputs = self.stage.module(inputs, shared, finish)
            else:
                # within the module's forward pass, where hooks have gathered the head's weights
                outputs = self.stage.module(
                    inputs, shared, lambda hidden, head: self.objective.loss(hidden, head, batch)
                )
        if self.last and batch is not None:
            if not (isinstance(outputs, tuple) and len(outputs) == 3 and isinstance(outputs[0], Tensor)):
                wanted = "a tensor with the sum of the losses, the sum of their weights, and a dict of further sums"
                text = f"{type(self.objective).__name__}.loss returns a {type(outputs).__name__}; return {wanted}"
                raise TypeError(text)
            outputs, weight, sums = outputs
            losses = {"loss": outputs.detach(), "weight": weight, "sums": dict(sums)}
            self.state.microbatch(microbatch)[LOSSES] = losses
        if keeps:
            self._in_flight[microbatch] = InFlight(list_floating_leaves(inputs), list_floating_leaves(outputs), split)
        return outputs.detach() if isinstance(outputs, Tensor) else map_leaves(detach_leaf, outputs)

    def _create_split_backward(self) -> Any:
        """Return a microbatch's split backward pass, which a program without actions I and W does not import."""
        from drawloom.components.pipeline.split_backward.split_backward import SplitBackward, WeightGrads

        self._weights = self._weights or WeightGrads()
        return SplitBackward(self._weights)

    def backward(self, microbatch: int, grads: list[Tensor] | None) -> list[Tensor]:
        kept = self._in_flight.pop(microbatch)
        output_grads: Sequence[Tensor | None] = grads or [None] * len(kept.outputs)
        # Outputs such as counts of tokens may not depend on any parameter.
        pairs = [pair for pair in zip(kept.outputs, output_grads, strict=True) if pair[0].requires_grad]
        if pairs:
            torch.autograd.backward([leaf for leaf, _ in pairs], [grad for _, grad in pairs])
        if self._reduces_next:
            self._stop_reducing_in_backward()
        return [_get_gradient_or_zeros(leaf, leaf.grad) for leaf in kept.inputs]

    def backward_input(self, microbatch: int, grads: list[Tensor] | None) -> list[Tensor]:
        kept = self._in_flight[microbatch]
        grads_of_inputs = _get_split_backward(kept).backward_input(kept.outputs, grads, kept.inputs)
        input_grads = [
            _get_gradient_or_zeros(leaf, grad) for leaf, grad in zip(kept.inputs, grads_of_inputs, strict=True)
        ]
        # Activations are freed here, because W may come much later.
        kept.inputs, kept.outputs = [], []
        return input_grads

    def backward_weight(self, microbatch: int) -> None:
        split = _get_split_backward(self._in_flight.pop(microbatch))
        if not self._reduces_next:
            split.backward_weight()
            return
        split.backward_weight(self.shards.list_reduction_units())
        self.shards.reduce_remaining_gradients()
        self._stop_reducing_in_backward()

    def list_inputs_and_outputs(self, microbatch: int) -> list[Tensor]:
        in_flight = self._in_flight[microbatch]
        return in_flight.inputs + in_flight.outputs

    def reduce_in_next_backward(self, is_last_in_step: bool) -> None:
        self.shards.reduce_in_next_backward(is_last_in_step)
        self._reduces_next = True

    def _stop_reducing_in_backward(self) -> None:
        """End the gradient reduction requested by `reduce_in_next_backward`."""
        self.shards.stop_reducing_in_backward()
        self._reduces_next = False

    @property
    def shards(self) -> Shards:
        if self.stage.shards is None:
            raise ValueError(
                f"stage {self.stage.index} can't gather parameters or reduce gradients: the stage has no `shards`"
            )
        return self.stage.shards


def _get_split_backward(kept: InFlight) -> Any:
    """Return a microbatch's split backward pass; ValueError if the stage does not split it."""
    if kept.split is None:
        raise ValueError("this stage's backward is not split: its program has no action I")
    return kept.split


def list_floating_leaves(tree: Any) -> list[Tensor]:
    """Return a tree's leaves with gradients: real or complex floating-point tensors."""
    if isinstance(tree, Tensor):  # the usual case between stages, where microseconds matter
        return [tree] if tree.is_floating_point() or tree.is_complex() else []
    return [leaf for leaf in list_leaves(tree) if _is_floating_tensor(leaf)]


def _is_floating_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def detach_leaf(leaf: Any) -> Any:
    """Return a leaf without its autograd graph."""
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def require_grad_in_place(tree: Any) -> Any:
    """Make the previous stage's output the leaves of this stage's own autograd graph: they require gradients."""
    if isinstance(tree, Tensor):
        return tree.requires_grad_() if tree.is_floating_point() or tree.is_complex() else tree
    return map_leaves(lambda leaf: leaf.requires_grad_() if _is_floating_tensor(leaf) else leaf, tree)


def _get_gradient_or_zeros(leaf: Tensor, grad: Tensor | None) -> Tensor:
    """Return a leaf's gradient, with its shape, as zeros if there is none."""
    return torch.zeros_like(leaf) if grad is None else grad
