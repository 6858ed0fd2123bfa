"""Peak memory of the device."""

from collections.abc import Mapping

from drawloom.components.ports.distributed import Device
from drawloom.components.ports.run import Step, Value
from drawloom.graph import component


@component(change="free")
class Memory:
    """`memory`: the most bytes in use so far on this rank."""

    device: Device

    def measure(self, step: Step) -> Mapping[str, Value]:
        """The device's peak, in bytes."""
        return {"memory": self.device.memory()}
