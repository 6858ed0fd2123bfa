"""Gradient clipping by value."""

from drawloom import above, component, setting
from drawloom.ports import Parameters, Step


@component(changes=("gradients",))
class ClipValue:
    """Clamping for all gradient elements to [-max_value, max_value]."""

    parameters: Parameters
    max_value: float = setting("maximum element magnitude after clipping", check=above(0))

    def run_phase(self, step: Step) -> None:
        """Clamp all gradients in place."""
        for _, parameter in self.parameters.named_parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-self.max_value, self.max_value)
