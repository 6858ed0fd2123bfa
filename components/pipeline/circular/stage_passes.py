"""Stage passes as autograd nodes with their own graphs, freed in their backward passes."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drawloom.components.pipeline.runtime.stage_runner import StageRunner
from drawloom.ports import MicrobatchInputs


@attrs.define(eq=False)
class StagePasses:
    """
    Passes of this rank's stages in one autograd graph, whose backward pass runs the stages backward.

    Parameter gradients are accumulated by microbatch (gradient accumulation), as in any schedule. A stage's sharded
    parameters are gathered before its first pass, and its gradients are reduced with its last backward pass.
    """

    stages: Mapping[int, StageRunner]
    microbatches: Sequence[MicrobatchInputs]
    token: Tensor
    _done: dict[int, int] = attrs.field(init=False, factory=dict)

    def run_differentiable_pass(self, stage: int, microbatch: int, tensor: Tensor) -> Tensor:
        """Return a stage's output (any shape) for a microbatch: a tensor, or the loss on the last stage."""
        runner = self.stages[stage]
        if stage not in self._done and runner.stage.shards is not None and not runner.stage.shards.gathers_per_block:
            runner.shards.start_unshard()
        self._done[stage] = self._done.get(stage, 0) + 1
        # With the token as an input, every pass is part of the graph, even the pass of token ids.
        return _Pass.apply(self, stage, microbatch, self.token, tensor)  # type: ignore[no-any-return, no-untyped-call]

    def run_forward(self, stage: int, microbatch: int, tensor: Tensor) -> Tensor:
        """Run a stage's forward pass, keep its autograd graph for `run_backward`, and return its output (any shape)."""
        inputs, runner = self.microbatches[microbatch], self.stages[stage]
        with torch.enable_grad():
            own = tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor
            output: Tensor = runner.forward(microbatch, own, inputs.shared, inputs.batch, inputs.finish)
        return output

    def run_backward(self, stage: int, microbatch: int, grad: Tensor) -> Tensor | None:
        """Return the gradient of a stage's input, with its shape, or None for token ids."""
        runner = self.stages[stage]
        self._done[stage] -= 1
        if (shards := runner.stage.shards) is not None and (shards.reduces_per_microbatch or not self._done[stage]):
            runner.reduce_in_next_backward(is_last_in_step=not self._done[stage])
        grads = runner.backward(microbatch, None if runner.last else [grad])
        return grads[0] if grads else None


class _Pass(torch.autograd.Function):
    """Node for a stage's pass on a microbatch; its backward pass runs the stage's own backward pass."""

    @staticmethod
    def forward(ctx: Any, passes: StagePasses, stage: int, microbatch: int, token: Tensor, tensor: Tensor) -> Tensor:
        """Return the stage's output (...) for an input (...); the token is 0-dimensional."""
        ctx.pass_of = passes, stage, microbatch
        return passes.run_forward(stage, microbatch, tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        passes, stage, microbatch = ctx.pass_of
        return None, None, None, None, passes.run_backward(stage, microbatch, grad)
