"""Messages as nodes of autograd."""

import weakref

import pytest
import torch
from torch import Tensor

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.p2p_links import p2p_links, ring
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.pipeline.circular.ring import (
    Exchange,
    Form,
    PendingSends,
    Ring,
    arrive,
    begin_token,
    end_token,
    start,
)
from support.processes import run_ranks

FORM = Form(torch.Size([2]), torch.float64, torch.device("cpu"))


def _opened() -> tuple[TorchProcesses, Ring]:
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"), timeout=20.0)
    processes.open()
    size = processes.world_size
    return processes, Ring(processes.rank, size, p2p_links(processes, "ring", [list(range(size))], ring(size)))


def _hand_over(used: bool, only_some: bool) -> list[float] | None:
    """Rank 0 sends its weight to rank 1, which multiplies it, or leaves it lying; the gradient that rank 0 gets."""
    processes, ring = _opened()
    outbox, weight = PendingSends(), torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    thread = begin_token(outbox, FORM.device, [weight])
    to, sources = ([1], []) if ring.rank == 0 else ([], [0])
    trip = Exchange(ring, outbox, to, sources, FORM)
    thread = start(trip, thread, [weight] if ring.rank == 0 else [])
    thread, came = arrive(trip, thread)
    output = came[0] * 3 if came and used else weight * 5
    [output] = end_token(outbox, thread, [output])
    if only_some:
        [gradient] = torch.autograd.grad(output.sum(), [weight], allow_unused=True)
    else:
        torch.autograd.backward(output.sum())
        gradient = weight.grad  # type: ignore[assignment]
    processes.close()
    return gradient.tolist() if gradient is not None else None


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("only_some", [True, False])
def test_gradients_come_back_the_way_that_tensors_went(used: bool, only_some: bool) -> None:
    """
    What was sent gets its gradient from the rank that received it, and zero if that left it lying.

    Both ranks go backward to the end, whatever they ask gradients of: neither waits for a message that does not come.
    """
    away = 3.0 if used else 0.0
    found = run_ranks(_hand_over, 2, used, only_some)
    assert found[0] == [5 + away, 5 + away]
    assert found[1] == (None if used else [5, 5])


def _cross() -> tuple[list[float], float]:
    """Both ranks send at once, in trips that overlap, from memory that is not contiguous."""
    processes, ring = _opened()
    outbox, peer = PendingSends(), 1 - ring.rank
    table = torch.arange(4.0, dtype=torch.float64).view(2, 2).requires_grad_()
    thread = begin_token(outbox, FORM.device, [table])
    trips = [Exchange(ring, outbox, [peer], [peer], FORM) for _ in range(2)]
    for column, trip in enumerate(trips):
        thread = start(trip, thread, [table[:, column] * (ring.rank + 1)])
    total: Tensor = torch.zeros((), dtype=torch.float64)
    for factor, trip in zip((1.0, 10.0), trips, strict=True):
        thread, [came] = arrive(trip, thread)
        total = total + factor * came.sum()
    [total] = end_token(outbox, thread, [total])
    torch.autograd.backward(total)
    processes.close()
    assert table.grad is not None
    return table.grad.flatten().tolist(), float(total.detach())


def test_trips_may_overlap() -> None:
    """Trips that are under way together keep their order, forward and backward."""
    first, second = run_ranks(_cross, 2)
    assert first == ([1, 10, 1, 10], 2 * (0 + 2 + 10 * (1 + 3)))
    assert second == ([2, 20, 2, 20], 0 + 2 + 10 * (1 + 3))


class Sent:
    """A message that is over when it is told so."""

    def __init__(self) -> None:
        self.over = False
        self.waited = False

    def is_completed(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.waited = True


def test_messages_are_let_go_of_when_they_are_over() -> None:
    """What has been sent is not held for the rest of the pass, and at its end all that is left is waited for."""
    outbox, first, second = PendingSends(), Sent(), Sent()
    outbox.add([first])
    first.over = True
    gone = weakref.ref(first)
    del first
    assert gone() is not None
    outbox.add([second])
    assert gone() is None
    outbox.clear()
    assert second.waited


def test_without_gradients_there_is_no_thread() -> None:
    """Where gradients are off, outputs need none; where they are on, they do, even of constants."""
    with torch.no_grad():
        assert not begin_token(PendingSends(), FORM.device, [torch.ones(2)]).requires_grad
    thread = begin_token(PendingSends(), FORM.device, [torch.ones(2)])
    assert end_token(PendingSends(), thread, [torch.ones(2)])[0].requires_grad
