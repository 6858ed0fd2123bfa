"""How much memory the run needs."""

from collections.abc import Mapping

from drawloom.components.ports.distributed import Device
from drawloom.components.ports.run import Step, Value
from drawloom.graph import component


@component(impact="safe")
class Memory:
    """`memory`: the most bytes in use so far on this rank."""

    device: Device

    def measure(self, step: Step) -> Mapping[str, Value]:
        """Ask the device."""
        return {"memory": self.device.memory()}
