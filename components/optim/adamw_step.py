"""AdamW with one launch per parameter group."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drawloom.components.optim.gradient_steps import ADAM_MOMENTS, AMSGRAD_MOMENTS, WideGradientStep
from drawloom.kernels.adamw.eager import ParamState, compute_step_scalars
from drawloom.ports import NodeState


class AdamWTriton(torch.optim.AdamW, WideGradientStep):
    """
    torch's AdamW for contiguous weights in float32 or bfloat16, with one launch per parameter group.

    Gradients have any float dtype; weights without a gradient are left out. A step changes nothing and does not count
    if `found_inf` is not 0; the host does not wait for the flag.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **defaults: Any) -> None:
        super().__init__(groups, **defaults)
        self._steppers: dict[nn.Parameter, tuple[Sequence[nn.Parameter], Any]] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights and their state."""
        for group in self.param_groups:
            parts = [part for part in group["params"] if part.grad is not None]
            if parts:
                self._update_weights(parts, group, self._get_or_create_stepper(parts, group["weight_decay"]))

    def _update_weights(self, parts: list[nn.Parameter], group: dict[str, Any], stepper: Any) -> None:
        # The device counts the steps, because the host learns too late which of them were skipped.
        steps = [self.state[part]["step"] for part in parts]
        scalars = compute_step_scalars(group["lr"], group["betas"], group["eps"], torch.stack(steps) + 1)
        stepper.step([part.grad for part in parts], scalars, found_inf=self.found_inf)
        # A list of tensors, because the host would read (and wait for) a single tensor without dimensions.
        torch._foreach_add_(steps, 1 if self.found_inf is None else [1 - self.found_inf] * len(steps))

    def _get_or_create_stepper(self, parts: list[nn.Parameter], weight_decay: float) -> Any:
        """
        Return a kernel launcher for these weights and their state, the cached one if the same weights have gradients.
        """
        known, stepper = self._steppers.get(parts[0], ((), None))
        if len(known) != len(parts) or any(a is not b for a, b in zip(known, parts, strict=True)):
            # Imported here, because Triton is not available on every machine.
            from drawloom.kernels.adamw.triton import AdamwTriton

            states = [self._get_or_create_state(part) for part in parts]
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
            self._steppers[parts[0]] = parts, stepper
        return stepper

    def _get_or_create_state(self, part: nn.Parameter) -> dict[str, Tensor]:
        """Return a weight's state; before its first step, fill it with zeros."""
        state: dict[str, Tensor] = self.state[part]
        if not state:
            state["step"] = torch.zeros((), device=part.device)
            names = AMSGRAD_MOMENTS if self.defaults["amsgrad"] else ADAM_MOMENTS
            state |= {name: torch.zeros_like(part) for name in names}
        return state

    def load_state_dict(self, state_dict: NodeState) -> None:
        """Replace the state by a copy of a `torch.optim.AdamW` state."""
        super().load_state_dict(state_dict)
        self._steppers.clear()
