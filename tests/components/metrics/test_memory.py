"""How much memory the run needs."""

import attrs
import torch

from drawloom.components.metrics.memory import Memory
from drawloom.components.ports.run import Step
from support.metrics import measured


@attrs.frozen
class Device:
    """A device of which so many bytes are in use."""

    bytes: int
    device: torch.device = torch.device("cpu")
    backend: str = "gloo"

    def memory(self) -> int:
        return self.bytes


def test_memory_is_what_the_device_says() -> None:
    """In bytes, a whole number."""
    assert measured(Memory(device=Device(2**40 + 1)), Step(1, 1)) == {"memory": 2**40 + 1}
