"""
Data-parallel gradient synchronization: the sum over replicas, divided once by the total weight.

With weights w and losses l of all tokens of all microbatches and replicas, the gradient is sum(w dl) / sum(w).
"""

import math
from collections.abc import Iterator
from functools import reduce

import torch
from torch import Tensor

from drawloom.components.gradients.norm import total_norm
from drawloom.components.ports.distributed import DATA, Mesh, Precision, Reduce
from drawloom.components.ports.model import SpreadParameters, gradient_of
from drawloom.components.ports.pipeline import Losses
from drawloom.components.ports.run import Step
from drawloom.graph import above, component, setting


@component(reads=("losses", "local_gradients"), writes=("gradients", "loss", "grad_norm"))
class Synchronize:
    """Sums gradients and losses over data-parallel replicas, divides by the total weight, skips non-finite steps."""

    parameters: SpreadParameters
    mesh: Mesh
    precision: Precision
    reduce: Reduce
    bucket_bytes: int = setting(
        default=32 * 2**20, impact="safe", check=above(0), doc="bytes of gradients that are sent together"
    )

    def run_phase(self, step: Step) -> None:
        """Set `loss` (mean by token, in nats) and `grad_norm`; the step is skipped if either is not finite."""
        losses: Losses = step.outputs["losses"]
        total, weight, step.tokens = self._sums(losses, step.tokens)
        self.parameters.sum_shared()
        gradients = [gradient_of(parameter) for _, parameter in self.parameters.named()]
        for bucket in self._buckets(gradients):
            self._sum(bucket)
        # Division after the sum, once: averages of averages would weight ranks with few tokens too much.
        if weight > 0 and gradients:  # a pipeline rank whose parameters are all frozen has no gradients
            torch._foreach_mul_(gradients, 1 / weight)
        step.outputs["loss"] = total / weight if weight > 0 else math.nan
        counted = [gradient_of(parameter) for _, parameter in self.parameters.counted()]
        step.outputs["grad_norm"] = total_norm(counted, self.reduce)
        step.skip_reason = step.skip_reason or _skip_reason(step, weight)

    def _sums(self, losses: Losses, tokens: int) -> tuple[float, float, int]:
        sums = torch.stack([losses.total, losses.weight])
        self.mesh.group("pipeline").sum(sums)
        sums = torch.cat([sums, sums.new_tensor([tokens])])
        self.mesh.group(*DATA).sum(sums)
        total, weight, tokens_of_all = sums.tolist()
        return total, weight, int(tokens_of_all)

    def _buckets(self, gradients: list[Tensor]) -> Iterator[list[Tensor]]:
        """Buckets of gradients in the order of the parameters; one for each collective."""
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
        """All-reduce a bucket in `precision.reduce`, or in the gradients' own dtype if that is wider."""
        dtype = reduce(torch.promote_types, (gradient.dtype for gradient in bucket), self.precision.reduce)
        flat = torch.cat([gradient.flatten().to(dtype) for gradient in bucket])
        self.mesh.replicas.sum(flat)
        for gradient, part in zip(bucket, torch.split(flat, [gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _skip_reason(step: Step, weight: float) -> str:
    if weight <= 0:
        return "there was no token to learn from"
    if not math.isfinite(step.outputs["loss"]):
        return f"the loss is {step.outputs['loss']}"
    if not math.isfinite(step.outputs["grad_norm"]):
        return f"the norm of the gradients is {step.outputs['grad_norm']}"
    return ""
