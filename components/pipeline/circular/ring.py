"""
Messages as nodes of autograd: what a rank sends in the forward pass comes back to it as a gradient in the backward.

All that goes over a rank's borders at one time is one trip. Its start and its arrival are two nodes, so that work which
stands between them, in either pass, hides the way. A trip may start with nothing that needs a gradient, or end in what
nobody uses, and autograd would then leave it out of the backward pass, while the other rank waits. So one scalar, the
thread, runs through all starts and arrivals, from the parameters to the outputs: a rank that goes backward makes every
trip again, in reverse.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drawloom.components.ports.distributed import P2PChannel, Pending


@attrs.frozen
class Ring:
    """This rank's place among those that share a pipeline, and its links to the ones beside it, by their places."""

    rank: int = 0
    size: int = 1
    links: Mapping[int, P2PChannel] = attrs.field(factory=dict)


@attrs.frozen
class Form:
    """What all tensors look like that pass from stage to stage."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        """Room for one of them."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


@attrs.define(eq=False)
class PendingSends:
    """Messages that nobody here waits for. They hold their tensors until they are over."""

    _sending: list[Pending] = attrs.field(init=False, factory=list)

    def add(self, messages: Sequence[Pending]) -> None:
        """Keep these, and let go of those that are over."""
        self._sending = [message for message in self._sending if not message.is_completed()]
        self._sending += messages

    def clear(self) -> None:
        """Until all are over."""
        for message in self._sending:
            message.wait()
        self._sending = []


@attrs.define(eq=False)
class Exchange:
    """Tensors on their way to and from neighbours, which are named by their places in the ring."""

    ring: Ring
    outbox: PendingSends
    to: Sequence[int]
    sources: Sequence[int]
    form: Form
    _coming: list[tuple[Pending, Tensor]] = attrs.field(init=False, factory=list)

    def begin(self, tensors: Sequence[Tensor], *, back: bool) -> None:
        """Send them out, or their gradients back, and make room for what comes; wait for nothing."""
        to, sources = (self.sources, self.to) if back else (self.to, self.sources)
        links, boxes = self.ring.links, [self.form.empty() for _ in sources]
        self._coming = [(links[source].receive(box), box) for source, box in zip(sources, boxes, strict=True)]
        pairs = zip(to, tensors, strict=True)
        self.outbox.add([links[peer].send(tensor.detach().contiguous()) for peer, tensor in pairs])

    def finish(self) -> list[Tensor]:
        """Wait for what comes."""
        coming, self._coming = self._coming, []
        for message, _ in coming:
            message.wait()
        return [box for _, box in coming]


def begin_token(outbox: PendingSends, device: torch.device, tensors: Sequence[Tensor]) -> Tensor:
    """The thread, tied to all that may ask for a gradient; it needs none itself if gradients are off."""
    anchor = torch.zeros((), device=device, requires_grad=torch.is_grad_enabled())
    return _apply(_Begin, outbox, anchor, *tensors)[0]


def start(trip: Exchange, thread: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Begin a trip with these tensors; gives the thread."""
    return _apply(_Start, trip, thread, *tensors)[0]


def arrive(trip: Exchange, thread: Tensor) -> tuple[Tensor, list[Tensor]]:
    """End a trip; gives the thread, and what came."""
    thread, *came = _apply(_Arrive, trip, thread)
    return thread, came


def end_token(outbox: PendingSends, thread: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors; whoever goes backward from any of them draws the thread."""
    outbox.clear()
    return list(_apply(_End, thread, *tensors))


def _apply(node: type[torch.autograd.Function], *arguments: Any) -> tuple[Tensor, ...]:
    """What a node of autograd gives, always as a tuple."""
    given = node.apply(*arguments)  # type: ignore[no-untyped-call]
    return given if isinstance(given, tuple) else (given,)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outbox: PendingSends, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.outbox, ctx.count = outbox, len(tensors)
        return anchor.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ctx.outbox.clear()
        count: int = ctx.count
        return (None,) * (2 + count)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trip: Exchange, thread: Tensor, *tensors: Tensor) -> Tensor:
        trip.begin(tensors, back=False)
        ctx.trip = trip
        return thread.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (None, gradient, *ctx.trip.finish())


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trip: Exchange, thread: Tensor) -> tuple[Tensor, ...]:
        ctx.trip = trip
        return (thread.clone(), *trip.finish())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.trip.begin(gradients, back=True)
        return None, gradient


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, thread: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.thread = thread.new_zeros(())
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return (ctx.thread, *gradients)
