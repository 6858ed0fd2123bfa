"""Passes of stages as autograd nodes: each has a graph of its own, which its backward pass frees."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drawloom.components.pipeline.runtime.program_runner import MicrobatchInputs
from drawloom.components.pipeline.runtime.stage_runner import StageRunner


@attrs.define(eq=False)
class StagePasses:
    """
    Runs this rank's stages on microbatches, so that a backward pass through the results runs them backward.

    Gradients of parameters are added microbatch by microbatch, as in any schedule. A stage's sharded parameters are
    gathered before its first pass, and its gradients reduced with the last backward pass of those that it has done.
    """

    stages: Mapping[int, StageRunner]
    microbatches: Sequence[MicrobatchInputs]
    token: Tensor
    _done: dict[int, int] = attrs.field(init=False, factory=dict)

    def forward(self, stage: int, microbatch: int, given: Tensor) -> Tensor:
        """The output (any shape) of a stage for a microbatch: a tensor, on the last stage the loss."""
        runner = self.stages[stage]
        if stage not in self._done and runner.stage.shards is not None and not runner.stage.shards.by_block:
            runner.unshard()
        self._done[stage] = self._done.get(stage, 0) + 1
        # A tensor that is no leaf: with the token in it every pass is part of the graph, that of token ids, too.
        return _Pass.apply(self, stage, microbatch, self.token, given)  # type: ignore[no-any-return, no-untyped-call]

    def run(self, stage: int, microbatch: int, given: Tensor) -> Tensor:
        """As `forward`, with a graph that is the stage's own."""
        inputs, runner = self.microbatches[microbatch], self.stages[stage]
        with torch.enable_grad():
            own = given.detach().requires_grad_() if given.is_floating_point() else given
            output: Tensor = runner.forward(microbatch, own, inputs.shared, inputs.batch, inputs.finish)
        return output

    def run_backward(self, stage: int, microbatch: int, grad: Tensor) -> Tensor | None:
        """The gradient of a stage's input, of its shape; None for token ids."""
        runner = self.stages[stage]
        self._done[stage] -= 1
        if (shards := runner.stage.shards) is not None and (shards.by_microbatch or not self._done[stage]):
            runner.reduce_next(final=not self._done[stage])
        grads = runner.backward(microbatch, None if runner.last else [grad])
        return grads[0] if grads else None


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passes: StagePasses, stage: int, microbatch: int, token: Tensor, given: Tensor) -> Tensor:
        """What the stage gives, (...), for an input (...); the token is 0-dimensional."""
        ctx.of = passes, stage, microbatch
        return passes.run(stage, microbatch, given)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        passes, stage, microbatch = ctx.of
        return None, None, None, None, passes.run_backward(stage, microbatch, grad)
