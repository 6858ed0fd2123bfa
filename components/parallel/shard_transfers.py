"""
What ranks with shards send one another, from where it is to where it is used: FSDP2's hooks for collectives.

torch copies slices into one buffer before it gathers, and from another to the parameters; and gradients into a buffer
before they are reduced. Of a step of the shape of Llama 3 8B on two H200 these copies took 3.4 %. They are operations
on what a hook's `allocate` returns, so that it can return a tensor for which they move nothing.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from drawloom.components.ports.distributed import Precision
from drawloom.kernels.sum_parts import sum_parts

SMALL = 2**18
"""
Bytes of a gradient for one rank below which it is copied into a message with others: a small message takes as long as
one of a quarter of a megabyte.
"""


def sent_dtype(precision: Precision, replicas: bool) -> torch.dtype:
    """
    The dtype in which gradients travel to the rank that has their slice.

    Those that `replicas` sum over, too, are the sums of a rank's shards, which would be rounded in between.
    """
    wide = torch.promote_types(precision.reduce, precision.gradient)
    return precision.gradient if precision.gradient.itemsize == 2 and wide == torch.float32 and not replicas else wide


@attrs.define
class _Listed:
    """What a stand-in stands for: tensors, or, where they were gathered one behind the other, a buffer."""

    tensors: Sequence[Tensor] = ()
    buffer: Tensor | None = None


class StandIn(Tensor):
    """
    A tensor without memory, in the place of a buffer (n,) that FSDP2 copies tensors to, or from.

    It takes note of the tensors, and keeps them as long as torch keeps the buffer. Any other operation is an error.
    """

    listed: _Listed

    @staticmethod
    def __new__(cls, size: Sequence[int], dtype: torch.dtype, device: torch.device, listed: _Listed) -> "StandIn":
        made: StandIn = Tensor._make_wrapper_subclass(cls, tuple(size), dtype=dtype, device=device)
        made.listed = listed
        return made

    @classmethod
    def empty(cls, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> "StandIn":
        """One that stands for nothing yet."""
        return cls(size, dtype, device, _Listed())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The operations of torch's `_fsdp_collectives.py`."""
        named = kwargs or {}
        match function.name():
            case "aten::view":
                size = torch.empty(args[0].shape, device="meta").view(args[1]).shape
                return cls(size, args[0].dtype, args[0].device, args[0].listed)
            case "fsdp::chunk_cat":
                named["out"].listed.tensors = list(args[0])
                return None
            case "fsdp::all_gather_copy_in":
                inputs, output = args[0], args[1]
                output.listed.tensors = list(inputs)
                return cls(output.shape, output.dtype, output.device, output.listed), output
            case "fsdp::split_with_sizes_copy":
                buffer = args[0].listed.buffer
                if buffer is not None:
                    torch.split_with_sizes_copy(buffer.view(args[0].shape), args[1], dim=args[2], out=named["out"])
                return None
        raise NotImplementedError(f"{function.name()} of a stand-in for a buffer of FSDP2")


@attrs.frozen(eq=False)
class DirectAllGather:
    """
    Gathers slices straight into the parameters that `outputs` gives memory, as `set_custom_all_gather` takes it.

    Those that the program starts (`async_op`) wait in their turn for what the current stream was given, so that it owns
    the memory. Others, of a forward pass without a gather before it, run in a stream of torch's: by way of a buffer.
    """

    outputs: Callable[[], Sequence[Tensor]]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """What stands for all slices of all ranks (ranks * n,)."""
        return StandIn.empty(size, dtype, device)

    def __call__(self, output_tensor: StandIn, input_tensor: StandIn, group: Any, async_op: bool = False) -> Any:
        """Gather what torch has listed; the work to wait for, or None."""
        listed = output_tensor.listed
        if async_op:
            # No element of what a backward pass has saved is changed: `data` keeps the version counters.
            wholes = [whole.data for whole in self.outputs()]
            return group.allgather_into_tensor_coalesced(wholes, list(listed.tensors))
        listed.buffer = torch.empty(output_tensor.shape, dtype=output_tensor.dtype, device=output_tensor.device)
        mine = listed.buffer.chunk(group.size())[group.rank()]
        for copy, slices in zip(mine.split([len(each) for each in listed.tensors]), listed.tensors, strict=True):
            copy.copy_(slices)
        group.allgather_into_tensor_coalesced([listed.buffer], [mine]).wait()
        return None


@attrs.define(eq=False)
class DirectReduceScatter:
    """
    Sums gradients over shards, sent from where they are, as `set_custom_reduce_scatter` takes it.

    Those of 16 bits are sent as they are, and added up in float32 where they arrive, so that sums are rounded once: a
    reduce-scatter of float32 would send each number in more bytes than it has, and one of 16 bits would round every
    partial sum.
    """

    _sums: bool = attrs.field(init=False, default=False)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """torch asks for two buffers in turn: for what is sent (ranks * n,), and for this rank's sums (n,)."""
        self._sums = not self._sums
        if self._sums:
            return StandIn.empty(size, dtype, device)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: StandIn, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """
        Put the sums over ranks of this rank's slices of all gradients in output_tensor (n,), one behind the other.

        Slices are of the first dimension, (rows / ranks rounded up, ...) each; the last ones are padded.
        """
        messages = [*_messages(input_tensor.listed.tensors, output_tensor, group.size())]
        if output_tensor.itemsize == 2:
            _exchange(messages, group)
        else:
            _reduce(messages, group, op)


@attrs.frozen(eq=False)
class _Message:
    """What each rank gets, parts (ranks, n), and where this rank's sums go, which are n elements in all."""

    parts: Tensor
    sums: Sequence[Tensor]

    def divided(self, row: Tensor) -> Sequence[Tensor]:
        """What of a row (n,), or of rows (any, n), belongs to each of the sums."""
        return torch.split(row, [len(each) for each in self.sums], dim=-1)


def _messages(gradients: Sequence[Tensor], output: Tensor, ranks: int) -> Iterator[_Message]:
    """One for each gradient, in place, and one for a copy of all that are small or do not divide evenly."""
    sums = torch.split(output, [-(-len(each) // ranks) * math.prod(each.shape[1:]) for each in gradients])
    packed: list[tuple[Tensor, Tensor]] = []
    for gradient, out in zip(gradients, sums, strict=True):
        # Alike on all ranks: it hangs on nothing but the shape. A rank's zeros may have another dtype and other strides
        # than the gradient of another, which copies it then.
        if len(gradient) % ranks == 0 and out.nbytes >= SMALL:
            yield _Message(gradient.to(out.dtype).contiguous().view(ranks, -1), [out])
        else:
            packed.append((gradient, out))
    if packed:
        copies = output.new_empty(ranks, sum(len(out) for _, out in packed))
        torch.ops.fsdp.chunk_cat([gradient for gradient, _ in packed], dim=0, num_chunks=ranks, out=copies)
        yield _Message(copies, [out for _, out in packed])


def _exchange(messages: Sequence[_Message], group: Any) -> None:
    """Send every other rank its parts, in one launch, and add up what they sent, from rank 0 on, in float32."""
    peers = [peer for peer in range(group.size()) if peer != group.rank()]
    received = [message.parts.new_empty(len(peers), message.parts.shape[1]) for message in messages]
    operations = []
    for tag, (message, rows) in enumerate(zip(messages, received, strict=True)):
        for peer, row in zip(peers, rows, strict=True):
            operations.append(dist.P2POp(dist.isend, message.parts[peer], group=group, tag=tag, group_peer=peer))
            operations.append(dist.P2POp(dist.irecv, row, group=group, tag=tag, group_peer=peer))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for message, rows in zip(messages, received, strict=True):
        own = message.divided(message.parts[group.rank()])
        for part, others, out in zip(own, message.divided(rows), message.sums, strict=True):
            sum_parts(part, others, out)


def _reduce(messages: Sequence[_Message], group: Any, op: Any) -> None:
    """Reduce and scatter all messages in one launch."""
    found = [
        message.sums[0] if len(message.sums) == 1 else message.parts.new_empty(message.parts.shape[1])
        for message in messages
    ]
    how = dist.ReduceScatterOptions()
    how.reduceOp = op
    group.reduce_scatter_tensor_coalesced(found, [message.parts.view(-1) for message in messages], how).wait()
    for message, row in zip(messages, found, strict=True):
        if len(message.sums) > 1:
            for part, out in zip(message.divided(row), message.sums, strict=True):
                out.copy_(part)
