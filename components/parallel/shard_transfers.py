"""
FSDP2's collectives without intermediate copies: tensors are sent directly from their source to their destination.

torch copies slices into one buffer before it gathers, and from another buffer to the parameters; it also copies
gradients into a buffer before it reduces them. In a step with Llama 3 8B's shape on two H200 these copies took 3.4 %.
They are operations on the result of a hook's `allocate`, so `allocate` can return a tensor that omits the copies.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from drawloom.components.ports.distributed import Precision
from drawloom.kernels.float8_message import pack_weights, unpack_weights
from drawloom.kernels.sum_parts import sum_parts

PACKED_BELOW_BYTES = 2**18
"""
Size of a rank's part of a gradient below which it is copied into a message with others: a small message takes as long
as a message of a quarter of a megabyte.
"""


def choose_gradient_message_dtype(precision: Precision, replicas: bool) -> torch.dtype:
    """
    Choose the dtype in which ranks send gradients to the rank with their slice.

    If `replicas` sum gradients, too, the wide dtype is sent: a rank's shard sums would otherwise be rounded in between.
    """
    wide = torch.promote_types(precision.reduce, precision.gradient)
    return precision.gradient if precision.gradient.itemsize == 2 and wide == torch.float32 and not replicas else wide


@attrs.frozen(eq=False)
class _Float8Messages:
    """
    Messages with a unit's slices: this rank's, uint8 (bytes,), and all ranks', (ranks, bytes).

    `widths` are row widths by parameter, 0 for parameters outside float8 layers.
    """

    own: Tensor
    gathered: Tensor
    widths: Sequence[int]


@attrs.define
class _ListedTensors:
    """Tensors behind a stand-in. If they were gathered into one buffer or into messages, these contain their values."""

    tensors: Sequence[Tensor] = ()
    buffer: Tensor | None = None
    messages: _Float8Messages | None = None


class StandIn(Tensor):
    """
    A tensor without memory, passed to torch in place of an FSDP2 buffer (n,), so nothing is copied into a buffer.

    It lists the tensors to copy, and keeps them alive as long as torch keeps the buffer. Any other operation is an
    error.
    """

    listed: _ListedTensors

    @staticmethod
    def __new__(
        cls, size: Sequence[int], dtype: torch.dtype, device: torch.device, listed: _ListedTensors
    ) -> "StandIn":
        stand_in: StandIn = Tensor._make_wrapper_subclass(cls, tuple(size), dtype=dtype, device=device)
        stand_in.listed = listed
        return stand_in

    @classmethod
    def without_tensors(cls, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> "StandIn":
        """Return a stand-in without tensors."""
        return cls(size, dtype, device, _ListedTensors())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operations in torch's `_fsdp_collectives.py`."""
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
                buffer, messages = args[0].listed.buffer, args[0].listed.messages
                if messages is not None:
                    unpack_weights(messages.gathered, named["out"], messages.widths)
                if buffer is not None:
                    torch.split_with_sizes_copy(buffer.view(args[0].shape), args[1], dim=args[2], out=named["out"])
                return None
        raise NotImplementedError(f"the stand-in for an FSDP2 buffer does not implement {function.name()}")


@attrs.frozen(eq=False)
class DirectAllGather:
    """
    All-gather of slices directly into the parameters, allocated by `allocate_parameters`; for `set_custom_all_gather`.

    A gather started by the program (`async_op`) first waits for earlier work on the current stream, which then owns the
    memory. Other gathers, in a forward pass without a gather before it, run in a torch stream and need a buffer.
    """

    allocate_parameters: Callable[[], Sequence[Tensor]]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a stand-in without memory for FSDP2's buffer of all ranks' slices (ranks * n,)."""
        return StandIn.without_tensors(size, dtype, device)

    def __call__(self, output_tensor: StandIn, input_tensor: StandIn, group: Any, async_op: bool = False) -> Any:
        """Gather the tensors listed by torch, and return the work to wait for, or None."""
        listed = output_tensor.listed
        if async_op:
            # `data` keeps the version counters: tensors that a backward pass has saved get the values they had.
            outputs = [output.data for output in self.allocate_parameters()]
            return group.allgather_into_tensor_coalesced(outputs, list(listed.tensors))
        listed.buffer = torch.empty(output_tensor.shape, dtype=output_tensor.dtype, device=output_tensor.device)
        own_part = listed.buffer.chunk(group.size())[group.rank()]
        copies = own_part.split([len(tensor) for tensor in listed.tensors])
        for copy, tensor in zip(copies, listed.tensors, strict=True):
            copy.copy_(tensor)
        group.allgather_into_tensor_coalesced([listed.buffer], [own_part]).wait()
        return None


@attrs.frozen(eq=False)
class Float8AllGather:
    """
    All-gather of slices in one message per rank, with weights in float8; for `set_custom_all_gather`.

    `widths` returns the row width for each parameter in float8, and 0 for others. Messages are unpacked into the
    parameters when these are used.
    """

    widths: Callable[[], Sequence[int]]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a stand-in without memory for FSDP2's buffer of all ranks' slices (ranks * n,)."""
        return StandIn.without_tensors(size, dtype, device)

    def __call__(self, output_tensor: StandIn, input_tensor: StandIn, group: Any, async_op: bool = False) -> Any:
        """Gather the tensors listed by torch, and return the work to wait for, or None."""
        widths = self.widths()
        own = pack_weights(output_tensor.listed.tensors, widths)
        gathered = own.new_empty(group.size(), len(own))
        output_tensor.listed.messages = _Float8Messages(own, gathered, widths)
        work = group.allgather_into_tensor_coalesced([gathered.view(-1)], [own])
        if async_op:
            return work
        work.wait()
        return None


@attrs.define(eq=False)
class DirectReduceScatter:
    """
    Sums of gradients over shards, sent without a copy; for `set_custom_reduce_scatter`.

    16-bit gradients are sent as they are, and added up in float32 by the receiver, so sums are rounded once: a
    reduce-scatter in float32 would send twice the bytes, and one in 16 bits would round every partial sum.
    """

    _sums: bool = attrs.field(init=False, default=False)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """
        Return a stand-in for the sent gradients (ranks * n,) or a buffer for this rank's sums (n,), as torch requests
        in turn.
        """
        self._sums = not self._sums
        if self._sums:
            return StandIn.without_tensors(size, dtype, device)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: StandIn, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """
        Write this rank's slices of all gradients, summed over ranks, to output_tensor (n,), one behind the other.

        Slices follow the first dimension, (rows / ranks rounded up, ...); the last ones are padded.
        """
        messages = [*_pack_gradients_into_messages(input_tensor.listed.tensors, output_tensor, group.size())]
        if output_tensor.itemsize == 2:
            _exchange_and_sum(messages, group)
        else:
            _reduce_scatter_messages(messages, group, op)


@attrs.frozen(eq=False)
class _Message:
    """
    Gradients in one transfer: `parts` by receiving rank, (ranks, n), and the tensors for this rank's sums, n elements
    in all.
    """

    parts: Tensor
    sums: Sequence[Tensor]

    def split_per_sum(self, row: Tensor) -> Sequence[Tensor]:
        """Split a message's row (n,), or rows (any, n), into its gradients' parts, one per output in `sums`."""
        return torch.split(row, [len(out) for out in self.sums], dim=-1)


def _pack_gradients_into_messages(gradients: Sequence[Tensor], output: Tensor, ranks: int) -> Iterator[_Message]:
    """Yield a message per large gradient, in place, and one for a copy of all gradients that are small or uneven."""
    sums = torch.split(output, [-(-len(grad) // ranks) * math.prod(grad.shape[1:]) for grad in gradients])
    packed: list[tuple[Tensor, Tensor]] = []
    for gradient, out in zip(gradients, sums, strict=True):
        # The choice depends only on the shape, so that it is equal on all ranks: zeros on one rank may have another
        # dtype and other strides than the gradient on another, and are copied then.
        if len(gradient) % ranks == 0 and out.nbytes >= PACKED_BELOW_BYTES:
            yield _Message(gradient.to(out.dtype).contiguous().view(ranks, -1), [out])
        else:
            packed.append((gradient, out))
    if packed:
        copies = output.new_empty(ranks, sum(len(out) for _, out in packed))
        torch.ops.fsdp.chunk_cat([gradient for gradient, _ in packed], dim=0, num_chunks=ranks, out=copies)
        yield _Message(copies, [out for _, out in packed])


def _exchange_and_sum(messages: Sequence[_Message], group: Any) -> None:
    """
    Send every other rank its parts, in one launch; add the received parts to this rank's, from rank 0 on, in float32.
    """
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
        own = message.split_per_sum(message.parts[group.rank()])
        for part, others, out in zip(own, message.split_per_sum(rows), message.sums, strict=True):
            sum_parts(part, others, out)


def _reduce_scatter_messages(messages: Sequence[_Message], group: Any, op: Any) -> None:
    """Reduce-scatter all messages in one launch."""
    outputs = [
        message.sums[0] if len(message.sums) == 1 else message.parts.new_empty(message.parts.shape[1])
        for message in messages
    ]
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    group.reduce_scatter_tensor_coalesced(outputs, [message.parts.view(-1) for message in messages], options).wait()
    for message, row in zip(messages, outputs, strict=True):
        if len(message.sums) > 1:
            for part, out in zip(message.split_per_sum(row), message.sums, strict=True):
                out.copy_(part)
