"""The steps of AdamW: torch's fused ones, or on GPUs those of a Triton kernel, which moves less memory."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drawloom.kernels.adamw import ParamState, step_scalars
from drawloom.kernels.operation import why_no_triton

ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")
"""torch's names of Adam's running means of gradients and of their squares."""

AMSGRAD_MOMENTS = (*ADAM_MOMENTS, "max_exp_avg_sq")
"""The same, and the largest mean of squares so far."""

DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of weights that the kernel is tested with."""


def adamw(groups: Iterable[dict[str, Any]], **options: Any) -> torch.optim.AdamW:
    """Return the fastest AdamW for the parameters of torch's groups; its state is torch's, whichever it is."""
    groups = list(groups)
    kind = AdamWTriton if all(_suits(part) for group in groups for part in group["params"]) else torch.optim.AdamW
    return kind(groups, fused=True, **options)


def _suits(parameter: nn.Parameter) -> bool:
    here = parameter.is_cuda and not why_no_triton(parameter.device)
    return here and parameter.dtype in DTYPES and parameter.is_contiguous()


class WideGradientStep(torch.optim.Optimizer):
    """
    A step for gradients in wider dtypes than the weights.

    A step with `found_inf`, float32 () on the device of the weights, that is not 0 changes nothing.
    """

    found_inf: Tensor | None = None


class AdamWTriton(torch.optim.AdamW, WideGradientStep):
    """
    torch's AdamW, of contiguous weights in float32 or bfloat16, by one launch for those of a group.

    Gradients are of any float dtype; weights without one are left out. A step with `found_inf`, float32 () on the
    device of the weights, that is not 0 changes nothing, and does not count; the host does not wait for it.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **defaults: Any) -> None:
        super().__init__(groups, **defaults)
        self._steppers: dict[int, tuple[Sequence[nn.Parameter], Any]] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights and their state."""
        for number, group in enumerate(self.param_groups):
            parts = [part for part in group["params"] if part.grad is not None]
            if parts:
                self._update(parts, group, self._stepper(number, parts, group["weight_decay"]))

    def _update(self, parts: list[nn.Parameter], group: dict[str, Any], stepper: Any) -> None:
        # Steps are counted on the device, which alone knows at once which of them it skips.
        steps = [self.state[part]["step"] for part in parts]
        scalars = step_scalars(group["lr"], group["betas"], group["eps"], torch.stack(steps) + 1)
        stepper.step([part.grad for part in parts], scalars, found_inf=self.found_inf)
        # A list of tensors: of one tensor without dimensions, torch would read the number.
        torch._foreach_add_(steps, 1 if self.found_inf is None else [1 - self.found_inf] * len(steps))

    def _stepper(self, number: int, parts: list[nn.Parameter], weight_decay: float) -> Any:
        """The kernel with the addresses of these weights and their state."""
        known, stepper = self._steppers.get(number, ((), None))
        if len(known) != len(parts) or any(a is not b for a, b in zip(known, parts, strict=True)):
            # Triton is imported where it launches.
            from drawloom.kernels.triton.adamw import AdamwTriton

            states = [self._state(part) for part in parts]
            stepper = AdamwTriton(
                [
                    ParamState(
                        part.detach(),
                        state["exp_avg"],
                        state["exp_avg_sq"],
                        weight_decay,
                        max_exp_avg_sq=state.get("max_exp_avg_sq"),
                    )
                    for part, state in zip(parts, states, strict=True)
                ],
                maximize=self.defaults["maximize"],
            )
            self._steppers[number] = parts, stepper
        return stepper

    def _state(self, part: nn.Parameter) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[part]
        if not state:
            state["step"] = torch.zeros((), device=part.device)
            names = AMSGRAD_MOMENTS if self.defaults["amsgrad"] else ADAM_MOMENTS
            state |= {name: torch.zeros_like(part) for name in names}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace the state by a copy of one of `torch.optim.AdamW`."""
        super().load_state_dict(state_dict)
        self._steppers.clear()
