"""
Data-parallel gradient synchronization (DDP, FSDP): the sum over ranks, divided once by the total weight.

For token weights w and losses l in all microbatches and replicas, the gradient is sum(w dl) / sum(w).
"""

import math
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from drawloom import component, setting
from drawloom.ports import Mesh, Parameters, Reduce, Step, StepState, get_or_create_gradient, sum_losses_and_weights


@component(
    reads=("losses", "local_gradients", "batches"),
    writes=("gradients", "loss", "grad_norm", "loss_weight", "tokens", "skip"),
)
class Synchronize:
    """Sum of gradients and losses over data-parallel ranks, divided by the total weight; skips non-finite steps."""

    parameters: Parameters
    mesh: Mesh
    reduce: Reduce
    norm: Literal["auto", "exact", "device"] = setting(
        'gradient norm computation: "exact" has equal bits in any layout, and the host waits for it; "device"'
        ' is a float64 sum on the device, which the host reads one step later; "auto" is "exact" on a CPU and'
        ' "device" on a GPU',
        default="auto",
    )

    def run_phase(self, step: Step) -> None:
        """
        Average the gradients, and write the step's numbers, float64 () on the losses' device.

        `loss` is the mean loss per token in nats, `grad_norm` the 2-norm over all gradients, `loss_weight` the tokens'
        total weight, and `tokens` the token count. The step is skipped if the loss or the norm is not finite.
        """
        total, weight, tokens = self._sum_losses_over_ranks(step.state).unbind()
        self.parameters.sum_remaining_gradients()
        gradients = {name: get_or_create_gradient(parameter) for name, parameter in self.parameters.named_parameters()}
        owned = {name for name, _ in self.parameters.owned_parameters()}
        # The sum is divided once, because an average of averages would give ranks with few tokens too much weight.
        factor = torch.where(weight > 0, 1 / weight, 1.0)
        is_exact = self.norm == "exact" or (self.norm == "auto" and not weight.is_cuda)
        counted = [] if is_exact else [name in owned for name in gradients]
        from drawloom.kernels.gradients.eager import scale_and_sum_squares

        squares = scale_and_sum_squares([*gradients.values()], factor, counted)
        if is_exact:
            from drawloom.components.gradients.exact_norm import compute_exact_norm

            norm = compute_exact_norm(
                [gradients[name] for name in gradients if name in owned], self.reduce, weight.device
            )
        else:
            norm = self.reduce.sum_over_ranks(squares).sqrt()
        loss = torch.where(weight > 0, total / weight, math.nan)
        for name, value in (("loss", loss), ("grad_norm", norm), ("loss_weight", weight), ("tokens", tokens)):
            step.state[name] = value
        # The reason refers only to the state: a step in a reference cycle would wait for the garbage collector.
        step.skip_update_if(~(loss.isfinite() & norm.isfinite()), partial(_explain_skipped_update, step.state))

    def _sum_losses_over_ranks(self, state: StepState) -> Tensor:
        """Return total losses, weights and tokens over all ranks: float64 (3,)."""
        sums = sum_losses_and_weights(state)
        self.mesh.pipeline_group.sum(sums)
        # Ranks along `context` split the same rows, but count whole rows; the quotient may be a fraction.
        tokens = sum(batch.token_count for batch in state["batches"]) / self.mesh.sizes.context
        # Fill in the number on the device, because a copy from the host would wait for the device.
        sums = torch.cat([sums, torch.full_like(sums[:1], tokens)])
        self.mesh.data_group.sum(sums)
        return sums


def _explain_skipped_update(state: StepState) -> str:
    """Return why the update is skipped: no trained token, a non-finite loss, or a non-finite norm; else ""."""
    loss, norm = state.number("loss"), state.number("grad_norm")
    if state.number("loss_weight") <= 0:
        return "there was no token to learn from"
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not math.isfinite(norm):
        return f"the norm of the gradients is {norm}"
    return ""
