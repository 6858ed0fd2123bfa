"""States to stage, and slow copies."""

import threading
from collections.abc import Iterator

import attrs
import pytest
import torch
from torch import Tensor

from drawloom.components.checkpoint.staging.copy_plan import Copy


@attrs.define
class Gate:
    """Blocks every large copy in another thread until it is opened."""

    opened: threading.Event = attrs.field(factory=threading.Event)
    reached: threading.Event = attrs.field(factory=threading.Event)
    fault: Exception | None = None


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Return a gate, opened after the test."""
    gate = Gate()
    make = Copy.copy_tensor

    def record_and_copy(copy: Copy, *, non_blocking: bool = False) -> None:
        if threading.current_thread() is not threading.main_thread():
            gate.reached.set()
            gate.opened.wait(20)
            if gate.fault is not None:
                raise gate.fault
        make(copy, non_blocking=non_blocking)

    monkeypatch.setattr(Copy, "copy_tensor", record_and_copy)
    yield gate
    gate.opened.set()


@pytest.fixture
def state() -> dict[str, Tensor]:
    """Return two large tensors and a small one."""
    return {"a": torch.arange(100_000.0), "b": torch.ones(50_000, dtype=torch.float64), "step": torch.tensor(3)}
