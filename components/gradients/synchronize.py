"""
Data-parallel gradient synchronization: the sum over ranks, divided once by the total weight.

With weights w and losses l of all tokens of all microbatches and replicas, the gradient is sum(w dl) / sum(w).
"""

import math
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from drawloom.components.distributed.device import HostCopy
from drawloom.components.gradients.norm import exact_norm
from drawloom.components.ports.distributed import DATA, Mesh, Reduce
from drawloom.components.ports.pipeline import Losses
from drawloom.components.ports.run import LateValues, Step
from drawloom.components.ports.stages import SpreadParameters, gradient_of
from drawloom.graph import component, setting
from drawloom.kernels.scale import scale


@component(reads=("losses", "local_gradients"), writes=("gradients", "loss", "grad_norm"))
class Synchronize:
    """Sums gradients and losses over data-parallel ranks, divides by the total weight, skips non-finite steps."""

    parameters: SpreadParameters
    mesh: Mesh
    reduce: Reduce
    norm: Literal["auto", "exact", "device"] = setting(
        default="auto",
        doc="how the norm is added up: exact is the same in any layout, and the host waits for it; device is a sum in "
        "float64 there, which the host learns a step later; auto is exact on a CPU",
    )

    def run_phase(self, step: Step) -> None:
        """Set `loss` (mean by token, in nats) and `grad_norm`; the step is skipped if either is not finite."""
        sums = self._sums(step.outputs["losses"], step.tokens)
        self.parameters.sum_gradients()
        gradients = {name: gradient_of(parameter) for name, parameter in self.parameters.named()}
        counted = {name for name, _ in self.parameters.counted()}
        if self.norm == "exact" or (self.norm == "auto" and not sums.is_cuda):
            self._divide_at_once(step, sums, gradients, counted)
        else:
            self._divide_on_device(step, sums, gradients, counted)

    # Division after the sum, once: averages of averages would weight ranks with few tokens too much.
    def _divide_at_once(self, step: Step, sums: Tensor, gradients: dict[str, Tensor], counted: set[str]) -> None:
        """With numbers that the host knows before it divides."""
        total, weight, tokens = sums.tolist()
        if weight > 0 and gradients:  # a pipeline rank whose parameters are all frozen has no gradients
            torch._foreach_mul_(list(gradients.values()), 1 / weight)
        loss = total / weight if weight > 0 else math.nan
        norm = exact_norm([gradients[name] for name in gradients if name in counted], self.reduce, sums.device)
        step.outputs |= {"loss": loss, "grad_norm": norm}
        step.tokens = round(tokens)
        step.skip_reason = step.skip_reason or _skip_reason(loss, norm, weight)

    def _divide_on_device(self, step: Step, sums: Tensor, gradients: dict[str, Tensor], counted: set[str]) -> None:
        """The same without a wait of the host, which reads the numbers when the step is settled."""
        total, weight, tokens = sums.unbind()
        factor = torch.where(weight > 0, 1 / weight, 1.0)
        squares = scale(list(gradients.values()), factor, [name in counted for name in gradients])
        loss, norm = torch.where(weight > 0, total / weight, math.nan), self.reduce.total(squares).sqrt()
        step.outputs |= {"loss": loss, "grad_norm": norm}
        finite = loss.isfinite() & norm.isfinite()
        step.found_inf = torch.ones_like(finite).float() if step.skip_reason else (~finite).float()
        copy = HostCopy.start({"numbers": torch.stack([loss, norm, weight, tokens])})
        step.late = partial(_late_values, copy)

    def _sums(self, losses: Losses, tokens: int) -> Tensor:
        """Over all ranks, the losses, their weights and the tokens: float64 (3,)."""
        sums = torch.stack([losses.total, losses.weight])
        self.mesh.group("pipeline").sum(sums)
        # Filled on the device: a copy of a number of the host's would wait for the device.
        # Ranks that share rows out count the same tokens, each a part, which may not be a whole number.
        sums = torch.cat([sums, torch.full_like(sums[:1], tokens / self.mesh.size("context"))])
        self.mesh.group(*DATA).sum(sums)
        return sums


def _late_values(copy: HostCopy) -> LateValues:
    loss, norm, weight, tokens = copy.read()["numbers"].tolist()
    return LateValues({"loss": loss, "grad_norm": norm}, round(tokens), _skip_reason(loss, norm, weight))


def _skip_reason(loss: float, norm: float, weight: float) -> str:
    if weight <= 0:
        return "there was no token to learn from"
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not math.isfinite(norm):
        return f"the norm of the gradients is {norm}"
    return ""
