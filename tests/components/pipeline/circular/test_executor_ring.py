"""Exchanges between ranks as autograd nodes."""

import weakref

import pytest
import torch
from torch import Tensor

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.p2p_links import connect_p2p_links
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.pipeline.circular.executor import (
    PendingSends,
    Ring,
    RingExchange,
    TensorMeta,
    create_exchange_token,
    finish_exchange,
    start_exchange,
)
from support.exchanges import list_ring_edges
from support.processes import run_ranks

FORM = TensorMeta(torch.Size([2]), torch.float64, torch.device("cpu"))


def _open_ring() -> tuple[TorchProcesses, Ring]:
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"), timeout=20.0)
    processes.open()
    size = processes.world_size
    return processes, Ring(
        processes.rank, size, connect_p2p_links(processes, "ring", [list(range(size))], list_ring_edges(size))
    )


def _hand_over(used: bool) -> list[float] | None:
    """Send rank 0's weight to rank 1, which multiplies it or does not use it; return rank 0's gradient."""
    processes, ring = _open_ring()
    pending_sends, weight = PendingSends(), torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    token = create_exchange_token(pending_sends, FORM.device)
    to, sources = ([(1, FORM)], []) if ring.rank == 0 else ([], [(0, FORM)])
    exchange = RingExchange(ring, pending_sends, to, sources)
    token = start_exchange(exchange, token, [weight] if ring.rank == 0 else [])
    token, came = finish_exchange(exchange, token)
    output = came[0] * 3 if came and used else weight * 5
    pending_sends.wait_for_all()
    torch.autograd.backward([output.sum(), token])
    processes.close()
    return None if weight.grad is None else weight.grad.tolist()


@pytest.mark.parametrize("used", [True, False])
def test_sent_tensors_get_their_gradients_from_the_receiver(used: bool) -> None:
    """
    A sent tensor gets its gradient from the receiving rank, and zero if it was not used there.

    Both ranks finish the backward pass: neither waits for a missing message.
    """
    away = 3.0 if used else 0.0
    gradients = run_ranks(_hand_over, 2, used)
    assert gradients[0] == [5 + away, 5 + away]
    assert gradients[1] == (None if used else [5, 5])


def _cross() -> tuple[list[float], float]:
    """Send from both ranks at once, in overlapping exchanges, differently long parts of non-contiguous memory."""
    processes, ring = _open_ring()
    pending_sends, peer = PendingSends(), 1 - ring.rank
    table = torch.arange(4.0, dtype=torch.float64).view(2, 2).requires_grad_()
    token = create_exchange_token(pending_sends, FORM.device)
    ends = [(peer, TensorMeta(torch.Size([length]), torch.float64, FORM.device)) for length in (2, 1)]
    exchanges = [RingExchange(ring, pending_sends, [end], [end]) for end in ends]
    for column, exchange in enumerate(exchanges):
        token = start_exchange(exchange, token, [table[column:, column] * (ring.rank + 1)])
    total: Tensor = torch.zeros((), dtype=torch.float64)
    for factor, exchange in zip((1.0, 10.0), exchanges, strict=True):
        token, [came] = finish_exchange(exchange, token)
        total = total + factor * came.sum()
    pending_sends.wait_for_all()
    torch.autograd.backward([total, token])
    processes.close()
    assert table.grad is not None
    return table.grad.flatten().tolist(), float(total.detach())


def test_exchanges_may_overlap() -> None:
    """Overlapping exchanges keep their order, forward and backward."""
    first, second = run_ranks(_cross, 2)
    assert first == ([1, 0, 1, 10], 2 * (0 + 2 + 10 * 3))
    assert second == ([2, 0, 2, 20], 0 + 2 + 10 * 3)


class Sent:
    """A pending send, completed by setting `over`."""

    def __init__(self) -> None:
        self.over = False
        self.waited = False

    def is_completed(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.waited = True


def test_completed_sends_are_released() -> None:
    """Tensors of completed sends are released during the pass, and at its end the remaining sends are waited for."""
    pending_sends, first, second = PendingSends(), Sent(), Sent()
    pending_sends.add([first])
    first.over = True
    gone = weakref.ref(first)
    del first
    assert gone() is not None
    pending_sends.add([second])
    assert gone() is None
    pending_sends.wait_for_all()
    assert second.waited
