"""Activations and gradients between ranks: their shapes, found on the meta device, and the buffers they arrive in."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.ports.distributed import P2PChannel, Pending
from drawloom.components.ports.model import BatchContext, LayerRange
from drawloom.components.ports.program import MessageOp
from drawloom.components.storage.pytree import branches, leaves, transform

Key = tuple[Any, ...]


@attrs.define(eq=False)
class ActivationSpecs:
    """
    Knows the tree of tensors that each stage takes, for microbatches of any shape.

    `build` makes the module of a span on the meta device. Each module is built, and each shape sent through, once.
    """

    spans: Sequence[LayerRange]
    build: Callable[[LayerRange], nn.Module]
    _modules: dict[int, nn.Module] = attrs.field(factory=dict)
    _known: dict[Key, Any] = attrs.field(factory=dict)

    def of(self, stage: int, tokens: Tensor, shared: BatchContext) -> Any:
        """What a stage takes for a microbatch, as a tree of meta tensors; what is no tensor stands for itself."""
        key = (stage, tokens.shape, tokens.dtype)
        if key not in self._known:
            self._known[key] = self._find(stage, tokens, shared)
        return self._known[key]

    def _find(self, stage: int, tokens: Tensor, shared: BatchContext) -> Any:
        if stage == 0:
            return on_meta(tokens)
        before = self.of(stage - 1, tokens, shared)
        with torch.no_grad():
            return on_meta(self._module(stage - 1)(before, on_meta(shared)))

    def _module(self, stage: int) -> nn.Module:
        if stage not in self._modules:
            self._modules[stage] = self.build(self.spans[stage])
        return self._modules[stage]


def on_meta(tree: Any) -> Any:
    """The tree with its tensors replaced by contiguous ones that hold nothing."""
    return transform(lambda leaf: torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf, tree)


def mismatch(payload: Any, expected: Any, path: str = "") -> str | None:
    """
    How a tree of tensors differs from the one that the receiver makes room for; None if it doesn't.

    Structures, shapes and dtypes are compared, and the values of leaves that are no tensors, since the receiver takes
    its own for them.
    """
    if isinstance(payload, Tensor) and isinstance(expected, Tensor):
        if payload.shape == expected.shape and payload.dtype == expected.dtype:
            return None
        return f"leaf {path or 'itself'} is {_written(payload)}, and {_written(expected)} is expected"
    found, wanted = branches(payload), branches(expected)
    if found is None or wanted is None or type(payload) is not type(expected):
        same = found is None and wanted is None and type(payload) is type(expected) and bool(payload == expected)
        return None if same else f"leaf {path or 'itself'} is {_written(payload)}, and {_written(expected)} is expected"
    if [name for name, _ in found] != [name for name, _ in wanted]:
        where = f" in {path}" if path else ""
        return f"there are {len(leaves(payload))} leaves{where}, and {len(leaves(expected))} are expected"
    parts = zip(found, wanted, strict=True)
    return next(filter(None, (mismatch(part, other, path + name) for (name, part), (_, other) in parts)), None)


def _written(leaf: Any) -> str:
    """A leaf in words: dtype and shape of a tensor."""
    if not isinstance(leaf, Tensor):
        return repr(leaf) if branches(leaf) is None else f"a {type(leaf).__name__}"
    return f"{str(leaf.dtype).removeprefix('torch.')} of shape {tuple(leaf.shape)}"


MessageKey = tuple[MessageOp, int, int]
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
