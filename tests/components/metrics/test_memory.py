"""How much memory the run needs."""

from collections.abc import Mapping
from typing import Any

import attrs

from drawloom.components.metrics.memory import Memory
from drawloom.components.ports.features import MemoryKind
from drawloom.components.ports.run import Step
from drawloom.graph import Every
from support.doubles import Machine
from support.metrics import combine, measure


@attrs.frozen
class User:
    """A node with this many bytes."""

    kept_bytes: Mapping[MemoryKind, int]

    def device_bytes(self) -> Mapping[MemoryKind, int]:
        return self.kept_bytes


def test_memory_is_read_from_the_device() -> None:
    """The metric is a whole number of bytes."""
    assert measure(Memory(device=Machine(used=2**40 + 1), users=Every()), Step(1, 1)) == {"memory": 2**40 + 1}


def test_memory_of_each_kind_is_its_maximum_over_ranks() -> None:
    """Each kind is from the rank with most of it, as is workspace, the rest of a rank's peak."""
    first: Any = {
        "device": Machine(used=100),
        "users": Every({"a": User({"masters": 70}), "b": User({"gradients": 5})}),
    }
    second: Any = {"device": Machine(used=90), "users": Every({"a": User({"parameters": 50})})}
    metrics = [Memory(**parts, by_kind=True) for parts in (first, second)]
    parts = [metric.measure_on_rank(Step(1, 1)) for metric in metrics]
    assert metrics[0].compute(combine(metrics[0].accumulators, parts), Step(1, 1)) == {
        "memory": 100,
        "memory/parameters": 50,
        "memory/masters": 70,
        "memory/compute_copies": 0,
        "memory/gradients": 5,
        "memory/optimizer_state": 0,
        "memory/workspace": 40,
    }
