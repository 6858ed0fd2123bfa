"""
Data-parallel gradient synchronization (DDP, FSDP): the sum over ranks, divided once by the total weight.

For token weights w and losses l in all microbatches and replicas, the gradient is sum(w dl) / sum(w).

The exact norm is bitwise equal for any parameter order and any distribution of whole parameters over ranks; if ranks
own slices, it may differ in the last bits. The host waits for the device. Every float64 is the smallest float64 times
an integer. The integers' sum is reduced over ranks in digits; a digit is a float64 small enough to be added without
rounding.
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from drawloom import component, setting
from drawloom.kernels.gradients.eager import scale_and_sum_squares
from drawloom.ports import Mesh, Parameters, Reduce, Step, StepState, get_or_create_gradient, sum_losses_and_weights

FLOAT64_SHIFT = 1074  # the smallest float64 is 2**-1074
DIGIT_BITS = 32  # 2**21 ranks can add their digits before the 53 bits of a float64 are full
DIGITS = 68  # for the largest float64, 2**1024, times the largest number of parameters


def compute_exact_norm(gradients: Sequence[Tensor], reduce: Reduce, device: torch.device) -> Tensor:
    """
    Return the 2-norm, float64 (), of all ranks' gradients (any shape).

    Gradients may be slices, but every gradient element must be passed on exactly one rank.
    """
    root = _compute_root_of_digits(reduce.sum_over_ranks(_sum_squares_as_exact_digits(gradients, device)))
    return torch.tensor(root, dtype=torch.float64, device=device)


def _compute_gradient_norms(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return every gradient's 2-norm, float64 (gradients,)."""
    if not gradients:
        return torch.zeros(0, dtype=torch.float64, device=device)
    return torch.stack([*torch._foreach_norm(list(gradients), 2, dtype=torch.float64)])


def _sum_squares_as_exact_digits(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """
    Return the sum of non-finite squares, then the digits for the sum of squares: float64 (1 + DIGITS,) on the CPU.
    """
    squares: list[float] = _compute_gradient_norms(gradients, device).square().tolist()
    # Infinities and NaN have no digits; their sum is the norm.
    nonfinite = [square for square in squares if not math.isfinite(square)]
    return torch.tensor([sum(nonfinite), *_sum_as_exact_digits(() if nonfinite else squares)], dtype=torch.float64)


def _compute_root_of_digits(digits: Tensor) -> float:
    """Return the square root of `_sum_squares_as_exact_digits`'s result; infinity or NaN if a gradient has one."""
    total: list[float] = digits.tolist()
    return math.sqrt(_join_digits(total[1:])) if math.isfinite(total[0]) else total[0]


def _sum_as_exact_digits(numbers: Iterable[float]) -> list[float]:
    """Return the exact sum of nonnegative numbers as digits, DIGIT_BITS bits each, the lowest first."""
    total = sum(map(_convert_to_integer, numbers))
    return [float(total >> DIGIT_BITS * index & 2**DIGIT_BITS - 1) for index in range(DIGITS)]


def _convert_to_integer(number: float) -> int:
    """Return a float64 as an integer, in units of the smallest float64."""
    numerator, denominator = number.as_integer_ratio()
    return (numerator << FLOAT64_SHIFT) // denominator


def _join_digits(digits: Iterable[float]) -> float:
    """Return the nearest float64 to digits, which may exceed DIGIT_BITS after a sum; infinity on overflow."""
    total = sum(int(digit) << DIGIT_BITS * index for index, digit in enumerate(digits))
    try:
        return total / (1 << FLOAT64_SHIFT)
    except OverflowError:
        return math.inf


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
        defers = step.defers_scaling and not is_exact
        squares = scale_and_sum_squares([*gradients.values()], factor, counted, write=not defers)
        if defers:
            step.scale_gradients(partial(scale_and_sum_squares, [*gradients.values()]), factor)
        if is_exact:
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
