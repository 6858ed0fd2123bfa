"""
From sums on each rank to the gradient of the step: the sum over replicas, divided once by the total weight.

With weights w and losses l of all tokens of all microbatches and replicas, the gradient is sum(w dl) / sum(w).
"""

import math
from collections.abc import Iterator
from functools import reduce

import torch
from torch import Tensor, nn

from drawloom.components.gradients.norm import total_norm
from drawloom.components.ports.distributed import Mesh, Precision, Reduce
from drawloom.components.ports.model import SpreadParameters
from drawloom.components.ports.pipeline import Losses
from drawloom.components.ports.run import Step
from drawloom.graph import above, component, setting


@component(reads=("losses", "local_gradients"), writes=("gradients", "loss", "grad_norm"))
class Synchronize:
    """Sums gradients and losses over replicas, divides by the total weight, and refuses what is not finite."""

    parameters: SpreadParameters
    mesh: Mesh
    precision: Precision
    reduce: Reduce
    bucket_bytes: int = setting(
        default=32 * 2**20, impact="safe", check=above(0), doc="bytes of gradients that are sent together"
    )

    def run_phase(self, step: Step) -> None:
        """Leave `loss` (mean by token, in nats) and `grad_norm`; refuse the step if either is not finite."""
        losses: Losses = step.outputs["losses"]
        total, weight, step.tokens = self._sums(losses, step.tokens)
        self.parameters.sum_shared()
        gradients = [_gradient(parameter) for _, parameter in self.parameters.named()]
        for bucket in self._buckets(gradients):
            self._sum(bucket)
        if weight > 0 and gradients:  # a pipeline rank whose parameters are all frozen has none
            torch._foreach_mul_(gradients, 1 / weight)
        step.outputs["loss"] = total / weight if weight > 0 else math.nan
        counted = [_gradient(parameter) for _, parameter in self.parameters.counted()]
        step.outputs["grad_norm"] = total_norm(counted, self.reduce)
        step.skip_reason = step.skip_reason or _refusal(step, weight)

    def _sums(self, losses: Losses, tokens: int) -> tuple[float, float, int]:
        sums = torch.stack([losses.total, losses.weight])
        self.mesh.group("pipeline").sum(sums)
        sums = torch.cat([sums, sums.new_tensor([tokens])])
        self.mesh.replicas.sum(sums)
        total, weight, tokens_of_all = sums.tolist()
        return total, weight, int(tokens_of_all)

    def _buckets(self, gradients: list[Tensor]) -> Iterator[list[Tensor]]:
        """Gradients in the order of the parameters, cut where a bucket is full."""
        if self.mesh.replicas.size == 1:
            return
        bucket: list[Tensor] = []
        for gradient in gradients:
            bucket.append(gradient)
            if sum(part.numel() * part.element_size() for part in bucket) >= self.bucket_bytes:
                yield bucket
                bucket = []
        if bucket:
            yield bucket

    def _sum(self, bucket: list[Tensor]) -> None:
        """Sum a bucket over the replicas, in `precision.reduce` or in the gradients' own dtype if that is wider."""
        dtype = reduce(torch.promote_types, (gradient.dtype for gradient in bucket), self.precision.reduce)
        flat = torch.cat([gradient.flatten().to(dtype) for gradient in bucket])
        self.mesh.replicas.sum(flat)
        for gradient, part in zip(bucket, torch.split(flat, [gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _gradient(parameter: nn.Parameter) -> Tensor:
    """A parameter's gradient; zeros where nothing reached it, so that all ranks sum the same tensors."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _refusal(step: Step, weight: float) -> str:
    if weight <= 0:
        return "there was no token to learn from"
    if not math.isfinite(step.outputs["loss"]):
        return f"the loss is {step.outputs['loss']}"
    if not math.isfinite(step.outputs["grad_norm"]):
        return f"the norm of the gradients is {step.outputs['grad_norm']}"
    return ""
