"""How the learning goes: what the phases of a step left behind."""

from collections.abc import Mapping

from drawloom.components.ports.run import Step, Value
from drawloom.graph import component

NAMES = ("loss", "grad_norm", "lr", "validation_loss")


@component(impact="safe")
class Learning:
    """`loss`, `grad_norm`, `lr` and `validation_loss`, as far as the step has them."""

    def measure(self, step: Step) -> Mapping[str, Value]:
        """Floats; a refused step has no loss, and says `refused`."""
        values: dict[str, Value] = {name: float(step.outputs[name]) for name in NAMES if name in step.outputs}
        return {"loss": None, **values} | {"loss": None, "skipped": True} if step.skip_reason else values
