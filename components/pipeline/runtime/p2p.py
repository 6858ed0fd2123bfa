"""Activations and gradients between ranks: what is sent, and the buffers that it arrives in."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd import profiler

from drawloom.components.ports.distributed import P2PChannel, Pending
from drawloom.components.ports.program import MessageOp
from drawloom.components.state.trees import branches, leaves, transform

WAIT = "wait for a message"
"""The range of a trace, inside of an action's own, in which the action waits for what another rank sends."""


def mismatch(payload: Any, expected: Any, path: str = "") -> str | None:
    """
    How a tree of tensors differs from the one that the receiver allocates; None if it doesn't.

    Structures, shapes and dtypes are compared, and the values of other leaves: they are not sent, the receiver uses its
    own.
    """
    if isinstance(payload, Tensor) and isinstance(expected, Tensor):
        if _alike(payload, expected):
            return None
        return f"leaf {path or 'itself'} is {_written(payload)}, and {_written(expected)} is expected"
    if (
        type(payload) is type(expected) is list
        and len(payload) == len(expected)
        and all(map(_alike, payload, expected))
    ):
        return None  # gradients mostly: this is far cheaper than naming each leaf
    found, wanted = branches(payload), branches(expected)
    if found is None or wanted is None or type(payload) is not type(expected):
        same = found is None and wanted is None and type(payload) is type(expected) and bool(payload == expected)
        return None if same else f"leaf {path or 'itself'} is {_written(payload)}, and {_written(expected)} is expected"
    if [name for name, _ in found] != [name for name, _ in wanted]:
        where = f" in {path}" if path else ""
        return f"there are {len(leaves(payload))} leaves{where}, and {len(leaves(expected))} are expected"
    parts = zip(found, wanted, strict=True)
    return next(filter(None, (mismatch(part, other, path + name) for (name, part), (_, other) in parts)), None)


def all_tensors(items: Iterable[Any]) -> bool:
    """Whether items are tensors, all of them."""
    for each in items:  # noqa: SIM110  # a generator takes longer to start than most of the lists take
        if not isinstance(each, Tensor):
            return False
    return True


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) is list and all_tensors(tree):
        return tree
    return [each for each in leaves(tree) if isinstance(each, Tensor)]


def _alike(one: Any, other: Any) -> bool:
    tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
    return tensors and one.shape == other.shape and one.dtype == other.dtype


def _written(leaf: Any) -> str:
    """A leaf for a message: dtype and shape of a tensor."""
    if not isinstance(leaf, Tensor):
        return repr(leaf) if branches(leaf) is None else f"a {type(leaf).__name__}"
    return f"{str(leaf.dtype).removeprefix('torch.')} of shape {tuple(leaf.shape)}"


MessageKey = tuple[MessageOp, int, int]
"""A message: its kind on the receiving side, the stage that receives it, the microbatch."""


@attrs.define(eq=False)
class P2PBuffers:
    """
    The messages of one step between this rank and its neighbours, `links` by their pipeline rank.

    Receives are posted early: a tensor is allocated then, and belongs to the caller of `wait_recv`. A sent tensor is
    held until its send completes, which is checked at each later send.
    """

    links: Mapping[int, P2PChannel]
    device: torch.device
    _receiving: dict[MessageKey, tuple[Any, list[Pending]]] = attrs.field(factory=dict)
    _sending: deque[Pending] = attrs.field(factory=deque)

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        """Begin to send tensors of any shape, in order."""
        link, sending = self.links[peer], self._sending
        for tensor in tensors:
            # NCCL and gloo send contiguous memory only.
            sending.append(link.send(tensor.contiguous()))
        while sending and sending[0].is_completed():
            # Waiting for a completed send returns at once, and lets torch free the tensor that it holds.
            sending.popleft().wait()

    def receive(self, key: MessageKey, peer: int, like: Any) -> None:
        """Begin to receive a tree of tensors of the shapes and dtypes of `like`, which may be on the meta device."""
        link = self.links[peer]
        # A tensor, or a list of some, is what mostly comes; to walk a tree takes microseconds.
        if isinstance(like, Tensor):
            tree: Any = torch.empty(like.shape, dtype=like.dtype, device=self.device)
            messages = [link.receive(tree)]
        else:
            flat = type(like) is list and all_tensors(like)
            tree = [self._empty(each) for each in like] if flat else transform(self._empty, like)
            messages = [link.receive(each) for each in tensors_of(tree)]
        self._receiving[key] = tree, messages

    def wait_recv(self, key: MessageKey) -> Any:
        """The received tree, once all of its tensors have arrived."""
        tree, messages = self._receiving.pop(key)
        if profiler._is_profiler_enabled:  # so that a trace tells waiting from computing
            with profiler.record_function(WAIT):
                _wait(messages)
        else:
            _wait(messages)
        return tree

    def finish(self) -> None:
        """Wait until all sends have completed."""
        while self._sending:
            self._sending.popleft().wait()

    def _empty(self, leaf: Any) -> Any:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=self.device) if isinstance(leaf, Tensor) else leaf


def _wait(messages: Sequence[Pending]) -> None:
    for message in messages:
        message.wait()
