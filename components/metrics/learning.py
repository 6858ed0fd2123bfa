"""Loss, gradient norm and learning rate, from the outputs of a step's phases."""

from collections.abc import Mapping

from drawloom.components.ports.run import Step, Value
from drawloom.graph import component

NAMES = ("loss", "grad_norm", "lr", "validation_loss")


@component(change="free")
class Learning:
    """`loss`, `grad_norm`, `lr` and `validation_loss`, as far as the step has them."""

    def measure(self, step: Step) -> Mapping[str, Value]:
        """Floats; a skipped step has no loss, and `skipped` is true."""
        values: dict[str, Value] = {name: float(step.outputs[name]) for name in NAMES if name in step.outputs}
        return {"loss": None, **values} | {"loss": None, "skipped": True} if step.skip_reason else values
