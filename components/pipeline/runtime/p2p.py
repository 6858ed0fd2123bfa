"""Messages with activations and gradients between ranks, and their receive buffers."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd import profiler

from drawloom.components.state.trees import list_labelled_children, list_leaves, map_leaves
from drawloom.ports import MessageOp, P2PChannel, Pending

WAIT = "wait for a message"
"""Name of the trace range in which an action waits for a message of another rank."""


def describe_tree_mismatch(payload: Any, expected: Any, path: str = "") -> str | None:
    """
    Describe how a tensor tree differs from the receiver's tree; return None if it doesn't.

    Structures, shapes and dtypes are compared, and the other leaves' values, which are not sent: the receiver uses its
    own values.
    """
    if _have_same_shape_and_dtype(payload, expected):
        return None
    if (
        type(payload) is type(expected) is list
        and len(payload) == len(expected)
        and all(map(_have_same_shape_and_dtype, payload, expected))
    ):
        return None  # mostly gradients: this is far cheaper than naming every leaf
    sent, wanted = list_labelled_children(payload), list_labelled_children(expected)
    if sent is None or wanted is None or type(payload) is not type(expected):
        are_leaves = sent is None and wanted is None and type(payload) is type(expected)
        same = are_leaves and not isinstance(payload, Tensor) and bool(payload == expected)
        return (
            None
            if same
            else f"leaf {path or 'itself'} is {_describe_leaf(payload)}, and {_describe_leaf(expected)} is expected"
        )
    if [name for name, _ in sent] != [name for name, _ in wanted]:
        where = f" in {path}" if path else ""
        return f"there are {len(list_leaves(payload))} leaves{where}, and {len(list_leaves(expected))} are expected"
    parts = zip(sent, wanted, strict=True)
    return next(
        filter(None, (describe_tree_mismatch(part, other, path + name) for (name, part), (_, other) in parts)), None
    )


def are_all_tensors(items: Iterable[Any]) -> bool:
    """Return whether all items are tensors."""
    for item in items:  # noqa: SIM110  # a generator takes longer to start than most of the lists take
        if not isinstance(item, Tensor):
            return False
    return True


def list_tensors(tree: Any) -> list[Tensor]:
    """Return a tree's tensors, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) is list and are_all_tensors(tree):
        return tree
    return [leaf for leaf in list_leaves(tree) if isinstance(leaf, Tensor)]


def _have_same_shape_and_dtype(first: Any, second: Any) -> bool:
    """Return whether both leaves are tensors with the same shape and dtype."""
    are_tensors = isinstance(first, Tensor) and isinstance(second, Tensor)
    return are_tensors and first.shape == second.shape and first.dtype == second.dtype


def _describe_leaf(leaf: Any) -> str:
    """Return a leaf as text for a message: a tensor's dtype and shape."""
    if not isinstance(leaf, Tensor):
        return repr(leaf) if list_labelled_children(leaf) is None else f"a {type(leaf).__name__}"
    return f"{str(leaf.dtype).removeprefix('torch.')} of shape {tuple(leaf.shape)}"


MessageKey = tuple[MessageOp, int, int]
"""Key of a message: its op on the receiving side, the receiving stage, and the microbatch."""


@attrs.define(eq=False)
class P2PBuffers:
    """
    One step's messages between this rank and its neighbours; `links` are channels by pipeline rank.

    Receives are posted early: they allocate a tensor for the caller of `wait_and_take_message`. A sent tensor is kept
    until its send completes; every later send checks for completion.
    """

    links: Mapping[int, P2PChannel]
    device: torch.device
    _receiving: dict[MessageKey, tuple[Any, list[Pending]]] = attrs.field(factory=dict)
    _sending: deque[Pending] = attrs.field(factory=deque)

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        """Start sending tensors (any shape), in order."""
        link, sending = self.links[peer], self._sending
        for tensor in tensors:
            # NCCL and gloo send contiguous memory only.
            sending.append(link.send(tensor.contiguous()))
        while sending and sending[0].is_completed():
            # Waiting for a completed send returns at once, and lets torch free its tensor.
            sending.popleft().wait()

    def start_receive(self, key: MessageKey, peer: int, like: Any) -> None:
        """Start receiving a tree with the shapes and dtypes of `like`, which may be on the meta device."""
        link = self.links[peer]
        # Most messages are a tensor or a list of tensors; walking a tree takes microseconds.
        if isinstance(like, Tensor):
            tree: Any = torch.empty(like.shape, dtype=like.dtype, device=self.device)
            messages = [link.receive(tree)]
        else:
            flat = type(like) is list and are_all_tensors(like)
            tree = [self._allocate_like(leaf) for leaf in like] if flat else map_leaves(self._allocate_like, like)
            messages = [link.receive(tensor) for tensor in list_tensors(tree)]
        self._receiving[key] = tree, messages

    def wait_and_take_message(self, key: MessageKey) -> Any:
        """Wait until all tensors in a message have arrived, and return their tree."""
        tree, messages = self._receiving.pop(key)
        # A trace separates waiting from computing.
        with profiler.record_function(WAIT) if profiler._is_profiler_enabled else nullcontext():
            for message in messages:
                message.wait()
        return tree

    def wait_for_sends(self) -> None:
        """Wait until all sends have completed."""
        while self._sending:
            self._sending.popleft().wait()

    def _allocate_like(self, leaf: Any) -> Any:
        """Return a new tensor with a leaf's shape and dtype; other leaves stay."""
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=self.device) if isinstance(leaf, Tensor) else leaf
