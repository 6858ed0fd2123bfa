"""Activations and gradients on their way between ranks: posted early, taken when needed, let go when sent."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.components.ports.distributed import P2PChannel, Pending
from drawloom.components.ports.program import Message
from drawloom.components.storage.pytree import leaves, transform

MessageKey = tuple[Message, int, int]
"""Which message: its kind on the receiving side, the stage that takes it, the microbatch."""


@attrs.define(eq=False)
class P2PBuffers:
    """
    The messages of one step. `links` are the neighbours by their place in the pipeline.

    A received tensor is made when its receive is posted and belongs to whoever takes it; a sent one is held until its
    message is over, which is looked after whenever another is sent.
    """

    links: Mapping[int, P2PChannel]
    device: torch.device
    _coming: dict[MessageKey, tuple[Any, list[Pending]]] = attrs.field(factory=dict)
    _going: deque[Pending] = attrs.field(factory=deque)

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        """Begin to send tensors, in order."""
        link, going = self.links[peer], self._going
        for tensor in tensors:
            going.append(link.send(tensor.contiguous()))
        while going and going[0].is_completed():
            going.popleft().wait()  # costs nothing now, and torch lets go of what it kept for it

    def receive(self, address: MessageKey, peer: int, like: Any) -> None:
        """Begin to receive a tree of tensors like this one, which may be on the meta device."""
        tree = transform(lambda leaf: self._room(leaf), like)
        link = self.links[peer]
        self._coming[address] = tree, [link.receive(leaf) for leaf in leaves(tree) if isinstance(leaf, Tensor)]

    def wait_recv(self, address: MessageKey) -> Any:
        """The tree that was received, once it is whole."""
        tree, messages = self._coming.pop(address)
        for message in messages:
            message.wait()
        return tree

    def finish(self) -> None:
        """Wait until all that was sent is over."""
        while self._going:
            self._going.popleft().wait()

    def _room(self, leaf: Any) -> Any:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=self.device) if isinstance(leaf, Tensor) else leaf
