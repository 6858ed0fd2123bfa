"""Copies for the host."""

from typing import Any

import torch

from drawloom.components.state.host_copy import HostCopy


class Arrival:
    """An event of a GPU."""

    waited = 0

    def synchronize(self) -> None:
        self.waited += 1


def test_the_host_waits_when_it_reads() -> None:
    """Tensors of a GPU are read once their copy has arrived, and not waited for before."""
    event: Any = Arrival()
    copy = HostCopy({"a": torch.ones(2)}, event)
    assert event.waited == 0
    assert copy.read()["a"].tolist() == [1.0, 1.0] and event.waited == 1


def test_tensors_on_the_cpu_are_not_copied() -> None:
    """They are ready at once."""
    tensor = torch.ones(2)
    copy = HostCopy.start({"a": tensor})
    assert copy.has_arrived and copy.read()["a"] is tensor
