"""What the optimizers of torch have in common as a phase: a step at the step's rate, and state by parameter names."""

from typing import Any

import torch

from drawloom.components.optim.named_state import load_named_state, named_state
from drawloom.components.ports.model import Parameters
from drawloom.components.ports.run import Step


class TorchOptimizer:
    """A phase and its state; a component of this kind makes `_optimizer` when it opens."""

    parameters: Parameters
    lr: float
    _optimizer: torch.optim.Optimizer

    def run_phase(self, step: Step) -> None:
        """Step once at `lr` times the step's factor, which is left as `lr`, unless refused; gradients are dropped."""
        step.outputs["lr"] = self.lr * step.outputs.get("lr_factor", 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = step.outputs["lr"]
        if not step.skip_reason:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def state_names(self) -> list[str]:
        """The names of the parameters that this rank trains."""
        return [name for name, _ in self.parameters.named()]

    def state_dict(self) -> dict[str, Any]:
        """What the optimizer keeps for each parameter."""
        return named_state(self._optimizer, self.parameters.named())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it over."""
        load_named_state(self._optimizer, self.parameters.named(), state)
