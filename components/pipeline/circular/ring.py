"""
Messages as autograd nodes: the gradient of a sent tensor is received from the rank that received the tensor.

A rank's simultaneous messages are one exchange. Its start and its arrival are two nodes, so computation between them,
in both passes, hides the latency. If no sent tensor needs a gradient, or no received tensor is used, autograd would
omit the exchange from the backward pass, while the other rank waits for it. So a scalar, the autograd token, passes
through all starts and arrivals, and the backward pass also begins at the token: it repeats every exchange in reverse.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drawloom.ports import P2PChannel, Pending


@attrs.frozen
class Ring:
    """Ring over pipeline ranks: this rank's index, the rank count, and channels to neighbours by index."""

    rank: int = 0
    size: int = 1
    links: Mapping[int, P2PChannel] = attrs.field(factory=dict)


@attrs.frozen
class TensorMeta:
    """Shape, dtype and device for a tensor between stages."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def allocate_empty(self) -> Tensor:
        """Return an uninitialized tensor (...) with this shape."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


@attrs.define(eq=False)
class PendingSends:
    """Pending sends, which keep their tensors alive until the sends complete."""

    _sending: list[Pending] = attrs.field(init=False, factory=list)

    def add(self, messages: Sequence[Pending]) -> None:
        """Add sends, and release completed sends."""
        self._sending = [message for message in self._sending if not message.is_completed()]
        self._sending += messages

    def wait_for_all(self) -> None:
        """Wait until all sends have completed."""
        for message in self._sending:
            message.wait()
        self._sending = []


@attrs.define(eq=False)
class RingExchange:
    """
    Tensor exchange with neighbours in the ring.

    `to` lists the tensors to send, and `sources` the tensors to receive: the neighbour's ring index, and the metadata.
    """

    ring: Ring
    pending_sends: PendingSends
    to: Sequence[tuple[int, TensorMeta]]
    sources: Sequence[tuple[int, TensorMeta]]
    _receiving: list[tuple[Pending, Tensor]] = attrs.field(init=False, factory=list)

    def start_transfers(self, tensors: Sequence[Tensor], *, reversed_direction: bool) -> None:
        """Post sends for tensors (any shapes), and receives, without waiting, in reverse in a backward pass."""
        to, sources = (self.sources, self.to) if reversed_direction else (self.to, self.sources)
        links, boxes = self.ring.links, [(source, meta.allocate_empty()) for source, meta in sources]
        # Receives are posted before sends, so that a transport that blocks in a send finds its receiver ready.
        self._receiving = [(links[source].receive(box), box) for source, box in boxes]
        pairs = zip(to, tensors, strict=True)
        self.pending_sends.add([links[peer].send(tensor.detach().contiguous()) for (peer, _), tensor in pairs])

    def wait_for_received_tensors(self) -> list[Tensor]:
        """Wait for the receives, and return the received tensors (any shapes)."""
        incoming, self._receiving = self._receiving, []
        for message, _ in incoming:
            message.wait()
        return [box for _, box in incoming]


def create_exchange_token(pending_sends: PendingSends, device: torch.device) -> Tensor:
    """Return a new autograd token, 0-dimensional, whose backward pass waits until all sends have completed."""
    return _apply_autograd_function(_BeginToken, pending_sends, torch.zeros((), device=device, requires_grad=True))[0]


def start_exchange(exchange: RingExchange, token: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Begin an exchange with these tensors (any shape), and return the token."""
    return _apply_autograd_function(_StartExchange, exchange, token, *tensors)[0]


def finish_exchange(exchange: RingExchange, token: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Finish an exchange, and return the token and the received tensors (any shape)."""
    token, *received = _apply_autograd_function(_FinishExchange, exchange, token)
    return token, received


def _apply_autograd_function(node: type[torch.autograd.Function], *arguments: Any) -> tuple[Tensor, ...]:
    """Return an autograd node's results, always as a tuple."""
    results = node.apply(*arguments)  # type: ignore[no-untyped-call]
    return results if isinstance(results, tuple) else (results,)


class _BeginToken(torch.autograd.Function):
    """Node that creates the autograd token."""

    # Its backward is the last one, and so waits for the sends of gradients.
    @staticmethod
    def forward(ctx: Any, pending_sends: PendingSends, anchor: Tensor) -> Tensor:
        """Return the token, 0-dimensional, given an anchor with the same shape."""
        ctx.pending_sends = pending_sends
        return anchor.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.pending_sends.wait_for_all()
        return None, None


class _StartExchange(torch.autograd.Function):
    """Node that starts an exchange; its backward pass finishes the exchange of gradients."""

    @staticmethod
    def forward(ctx: Any, exchange: RingExchange, token: Tensor, *tensors: Tensor) -> Tensor:
        """Start sending tensors with any shape and dtype, and return the token, 0-dimensional."""
        exchange.start_transfers(tensors, reversed_direction=False)
        ctx.exchange = exchange
        return token.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (None, gradient, *ctx.exchange.wait_for_received_tensors())


class _FinishExchange(torch.autograd.Function):
    """Node that finishes an exchange; its backward pass starts the exchange of gradients."""

    @staticmethod
    def forward(ctx: Any, exchange: RingExchange, token: Tensor) -> tuple[Tensor, ...]:
        """Return the token, 0-dimensional, and the received tensors, with any shape and dtype."""
        ctx.exchange = exchange
        return (token.clone(), *exchange.wait_for_received_tensors())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.exchange.start_transfers(gradients, reversed_direction=True)
        return None, gradient
