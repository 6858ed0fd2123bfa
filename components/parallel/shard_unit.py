"""
FSDP units: parameters in slices on several ranks, gathered, freed and reduced together.

A module has a parameter's slice, a DTensor along its first dimension, or while the unit is gathered the whole
parameter. The whole parameter is one object for the run, and the unit's memory is freed in between, so tensors saved by
autograd are valid again after the next gather. Zhao et al. 2023, "PyTorch FSDP", arXiv 2304.11277; slices are as in
torch's `fully_shard`, without its private names, because these change with every release.

Collectives send tensors directly from their source to their destination. Slices are gathered into the parameters' own
memory, and large gradients are sent from where the backward pass wrote them. In a step with Llama 3 8B's shape on two
H200, copies into buffers, as in torch's `fully_shard`, took 3.4 %.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any, Literal, Protocol

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from drawloom import internal
from drawloom.components.parallel.data_shard import get_local_slice, slice_rows
from drawloom.kernels.gradients.eager import sum_parts
from drawloom.ports import GatherEncoding, LinearLayer, Precision, TensorSlice

PACKED_BELOW_BYTES = 2**23
"""
Size of a rank's part of a gradient below which it is copied into a message with its neighbours: the host takes longer
to send a message than a GPU to copy its gradient.
"""


def choose_gradient_message_dtype(precision: Precision, replicas: bool) -> torch.dtype:
    """
    Choose the dtype in which ranks send gradients to the rank with their slice.

    If `replicas` sum gradients, too, the wide dtype is sent: a rank's shard sums would otherwise be rounded in between.
    """
    wide = torch.promote_types(precision.reduce, precision.gradient)
    return precision.gradient if precision.gradient.itemsize == 2 and wide == torch.float32 and not replicas else wide


@attrs.frozen(eq=False)
class StartedGather:
    """An all-gather in progress; `inputs` live until it is completed."""

    work: Any
    inputs: Sequence[Tensor]
    unpack: Callable[[], None] | None = None

    def wait(self) -> None:
        """Wait for the gathered slices, and unpack messages; on a GPU only the current stream waits."""
        self.work.wait()
        if self.unpack is not None:
            self.unpack()


@torch.no_grad()
def cast_and_pad(slices: Sequence[Tensor], sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Return flat slices with these sizes in a dtype, copied only if necessary; padding is not initialised."""
    flat = [part.view(-1) for part in slices]
    copied = [index for index, part in enumerate(flat) if part.numel() < sizes[index] or part.dtype != dtype]
    if copied:
        padded = torch.split(
            flat[0].new_empty(sum(sizes[index] for index in copied), dtype=dtype), [sizes[index] for index in copied]
        )
        torch._foreach_copy_(
            [part[: flat[index].numel()] for index, part in zip(copied, padded, strict=True)],
            [flat[index] for index in copied],
        )
        for index, part in zip(copied, padded, strict=True):
            flat[index] = part
    return flat


ExchangeParts = Callable[[Sequence[Tensor], Any], tuple[Sequence[Tensor], Sequence[Any]]]
"""
Function that starts to exchange tensors (ranks, n), by receiving rank, in a torch group. It returns the other ranks'
parts for this rank, (ranks - 1, n) in rank order by tensor, and the transfers to wait for.
"""


def send_parts(tensors: Sequence[Tensor], group: Any) -> tuple[Sequence[Tensor], Sequence[Any]]:
    """Send every other rank its parts, in one launch."""
    peers = [peer for peer in range(group.size()) if peer != group.rank()]
    received = [parts.new_empty(len(peers), parts.shape[1]) for parts in tensors]
    operations = []
    for tag, (parts, rows) in enumerate(zip(tensors, received, strict=True)):
        for peer, row in zip(peers, rows, strict=True):
            operations.append(dist.P2POp(dist.isend, parts[peer], group=group, tag=tag, group_peer=peer))
            operations.append(dist.P2POp(dist.irecv, row, group=group, tag=tag, group_peer=peer))
    return received, dist.batch_isend_irecv(operations)


class StartedSum(Protocol):
    """Gradients on their way to the ranks with the slices."""

    def wait(self) -> Tensor:
        """
        Wait for this rank's sums, and return them, (n,), one slice behind the other, padded to equal sizes.

        On a GPU only the current stream waits.
        """


@torch.no_grad()
def start_sum(
    gradients: Sequence[Tensor | None],
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: torch.device,
    group: Any,
    exchange: ExchangeParts = send_parts,
) -> StartedSum:
    """
    Start to sum gradients with these shapes over ranks; None is a gradient of zeros.

    A rank gets its slices along the first dimension, (rows / ranks rounded up, ...). 16-bit gradients are sent
    as they are, and added up in float32 by the receiver, so sums are rounded once: a reduce-scatter in float32 would
    send twice the bytes, and one in 16 bits would round every partial sum.
    """
    ranks = group.size()
    sums = torch.empty(sum(count_slice_elements(shape, ranks) for shape in shapes), dtype=dtype, device=device)
    messages = [*_pack_gradients_into_messages(gradients, shapes, sums, ranks)]
    if dtype.itemsize > 2:
        return _start_reduce_scatter(sums, messages, group)
    received, works = exchange([message.parts for message in messages], group)
    return _Exchange(sums, messages, received, works, group.rank())


def count_slice_elements(shape: Sequence[int], ranks: int) -> int:
    """Return the elements in a rank's padded slice of a parameter."""
    return -(-shape[0] // ranks) * prod(shape[1:])


@attrs.frozen(eq=False)
class _Message:
    """Gradients in one transfer: `parts` by receiving rank, (ranks, n), and the tensor for this rank's sums, (n,)."""

    parts: Tensor
    sums: Tensor


def _pack_gradients_into_messages(
    gradients: Sequence[Tensor | None], shapes: Sequence[Sequence[int]], output: Tensor, ranks: int
) -> Iterator[_Message]:
    """Yield a message per large gradient, in place, and one per run of neighbours that are small or uneven, copied."""
    packed: list[Tensor] = []
    begin = end = 0
    for gradient, shape in zip(gradients, shapes, strict=True):
        size = count_slice_elements(shape, ranks)
        # The choice depends only on the shape, so that it is equal on all ranks.
        is_packed = shape[0] % ranks > 0 or size * output.itemsize < PACKED_BELOW_BYTES
        if packed and not is_packed:
            yield _Message(torch.cat(packed, 1), output[begin:end])
            packed = []
        if not packed:
            begin = end
        end += size
        parts = _divide_among_ranks(gradient, shape, output, ranks)
        if is_packed:
            packed.append(parts)
        else:
            yield _Message(parts, output[begin:end])
    if packed:
        yield _Message(torch.cat(packed, 1), output[begin:end])


def _divide_among_ranks(gradient: Tensor | None, shape: Sequence[int], output: Tensor, ranks: int) -> Tensor:
    """Return a gradient's padded parts by rank, (ranks, n), in the output's dtype."""
    if gradient is None:
        return output.new_zeros(ranks, count_slice_elements(shape, ranks))
    rows = gradient.to(output.dtype).contiguous().view(shape[0], -1)
    missing = -shape[0] % ranks
    return (F.pad(rows, (0, 0, 0, missing)) if missing else rows).view(ranks, -1)


@attrs.frozen(eq=False)
class _Exchange:
    """Messages sent to all other ranks, whose parts are added up here."""

    sums: Tensor
    messages: Sequence[_Message]
    received: Sequence[Tensor]
    works: Sequence[Any]
    rank: int

    @torch.no_grad()
    def wait(self) -> Tensor:
        """Add the received parts to this rank's, from rank 0 on, in float32."""
        for work in self.works:
            work.wait()
        for message, rows in zip(self.messages, self.received, strict=True):
            sum_parts(message.parts[self.rank], rows, message.sums)
        return self.sums


@attrs.frozen(eq=False)
class _ReduceScatter:
    """A reduce-scatter for all messages; `inputs` live until it is completed."""

    sums: Tensor
    inputs: Sequence[Tensor]
    work: Any

    def wait(self) -> Tensor:
        """Wait for the sums."""
        self.work.wait()
        return self.sums


def _start_reduce_scatter(sums: Tensor, messages: Sequence[_Message], group: Any) -> _ReduceScatter:
    """Reduce-scatter all messages in one launch."""
    inputs = [message.parts.view(-1) for message in messages]
    return _ReduceScatter(sums, inputs, group.reduce_scatter_tensor_coalesced([m.sums for m in messages], inputs))


ALIGNMENT = 128
"""Alignment of gathered parameters in their unit's memory, in elements: some products need 16 bytes."""


@attrs.frozen(kw_only=True, eq=False)
class ShardGroups:
    """
    The ranks with a unit's slices: torch's mesh, its process group, and the group of this slice's replicas, if any.
    """

    mesh: Any
    shards: Any
    replicas: Any

    @classmethod
    def from_torch_mesh(cls, mesh: Any) -> "ShardGroups":
        """Return a mesh's groups: the last dimension shards, and the first of two has replicas (HSDP)."""
        replicas = mesh.get_group(0) if mesh.ndim > 1 else None
        return cls(mesh=mesh, shards=mesh.get_group(mesh.ndim - 1), replicas=replicas)


@attrs.frozen(kw_only=True)
class UnitDtypes:
    """Dtypes of gathered parameters, and of gradients in messages between ranks."""

    gathered: torch.dtype
    message: torch.dtype


@attrs.define(eq=False)
class ShardedParameter:
    """
    One parameter: `sharded` is the DTensor, `master` the same memory as a plain parameter, and `unsharded` the gathered
    parameter. `owners` are its modules, with its names there; messages with the parameter may have an `encoding`.
    """

    owners: Sequence[tuple[nn.Module, str]]
    sharded: nn.Parameter
    tensor_slice: TensorSlice
    encoding: GatherEncoding | None
    master: nn.Parameter = internal()
    unsharded: nn.Parameter = internal()
    message: Tensor = internal()
    """All ranks' slices (ranks * n,), padded to equal sizes: `unsharded`'s memory."""

    @classmethod
    def shard(cls, parameter: nn.Parameter, owners: Sequence[tuple[nn.Module, str]], mesh: Any) -> "ShardedParameter":
        """Replace a module's parameter by this rank's slice, on the same device."""
        # Imported here, because the import takes a second, which runs without shards need not spend.
        from torch.distributed.tensor import DTensor, Replicate, Shard

        last = mesh.ndim - 1
        tensor_slice = slice_rows(tuple(parameter.shape), mesh.size(last), mesh.get_local_rank(last))
        sharded = DTensor.from_local(
            parameter.detach()[tensor_slice.index()].clone(),
            mesh,
            (*[Replicate()] * last, Shard(0)),
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        module, name = owners[0]
        encoding = module.gather_encodings.get(name) if isinstance(module, LinearLayer) else None
        result = cls(owners, nn.Parameter(sharded, parameter.requires_grad), tensor_slice, encoding)
        result.set_in_modules(result.sharded)
        return result

    def create_parameters(self, memory: Tensor, gradient_dtype: torch.dtype) -> None:
        """Create `master`, and `unsharded` in memory (ranks * n,); gradients are accumulated in `gradient_dtype`."""
        trained, shape = self.sharded.requires_grad, self.tensor_slice.shape
        self.master = nn.Parameter(get_local_slice(self.sharded), trained)
        # `data` has a version counter of its own: a gather does not invalidate tensors that a backward pass needs.
        self.unsharded = nn.Parameter(memory.data[: prod(shape)].view(shape), trained)
        if trained:
            self.unsharded.grad_dtype = gradient_dtype
        self.message = memory.data

    @property
    def encoded_width(self) -> int:
        """The width of rows in messages if they are encoded, else 0."""
        return 0 if self.encoding is None else self.tensor_slice.shape[1]

    def set_in_modules(self, parameter: nn.Parameter) -> None:
        """Set the sharded or the gathered parameter in the modules."""
        for module, name in self.owners:
            module._parameters[name] = parameter  # `setattr` takes microseconds longer

    def take_gradient(self) -> Tensor | None:
        """Return the gathered parameter's gradient, and remove it."""
        gradient, self.unsharded.grad = self.unsharded.grad, None
        return gradient


def gather_by_collective(unit: "ShardUnit") -> StartedGather:
    """Start to gather all ranks' slices of a unit, in one launch."""
    packed = unit.pack_slices()
    messages, unpack = unit.open_messages(packed)
    work = unit.groups.shards.allgather_into_tensor_coalesced([message.view(-1) for message in messages], packed)
    return StartedGather(work, packed, unpack)


@attrs.define(eq=False)
class ShardUnit:
    """Parameters gathered together, and reduced by one collective; there may be none."""

    parameters: Sequence[ShardedParameter]
    groups: ShardGroups
    dtypes: UnitDtypes
    gather_slices: Callable[["ShardUnit"], StartedGather] = gather_by_collective
    exchange_parts: ExchangeParts = send_parts
    state: Literal["freed", "gathering", "gathered"] = "freed"
    _gather: StartedGather | None = None
    _sums_of_shards: Tensor | None = None
    """Earlier microbatches' gradients summed over shards, but not over replicas, (n,)."""
    _storage: Any = None
    _bytes: int = 0

    @property
    def trained(self) -> list[ShardedParameter]:
        """The trained parameters."""
        return [parameter for parameter in self.parameters if parameter.sharded.requires_grad]

    def create_parameters(self, gradient_dtype: torch.dtype) -> None:
        """Create the masters, and the gathered parameters without memory, once the slices have memory."""
        if not self.parameters:
            return
        ranks = self.groups.shards.size()
        sizes = [ranks * count_slice_elements(parameter.tensor_slice.shape, ranks) for parameter in self.parameters]
        begins = [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
        device = self.parameters[0].sharded.device
        memory = torch.empty(begins[-1], dtype=self.dtypes.gathered, device=device)
        for parameter, begin, size in zip(self.parameters, begins, sizes, strict=False):
            parameter.create_parameters(memory[begin : begin + size], gradient_dtype)
        self._storage, self._bytes = memory.untyped_storage(), memory.nbytes
        self._storage.resize_(0)

    def start_gather(self) -> None:
        """Start to gather the parameters, unless they are gathered; on a GPU, after earlier work in this stream."""
        if self.state == "freed" and self.parameters:
            self.state = "gathering"
            self._storage.resize_(self._bytes)
            self._gather = self.gather_slices(self)

    @torch.no_grad()
    def pack_slices(self) -> Sequence[Tensor]:
        """Return this rank's messages to the others: its slices, (n,) by parameter, or one with all slices encoded."""
        slices = [parameter.master.detach() for parameter in self.parameters]
        sizes = [parameter.message.numel() // self.groups.shards.size() for parameter in self.parameters]
        flat = cast_and_pad(slices, sizes, self.dtypes.gathered)
        return flat if self._encoding is None else [self._encoding.pack_weights(flat, self._encoded_widths)]

    def open_messages(self, packed: Sequence[Tensor]) -> tuple[Sequence[Tensor], Callable[[], None] | None]:
        """Return memory for all ranks' messages like `packed`, (ranks, n) each, and how to unpack them, if needed."""
        ranks = self.groups.shards.size()
        outputs = [parameter.message.view(ranks, -1) for parameter in self.parameters]
        if self._encoding is None:
            return outputs, None
        messages = packed[0].new_empty(ranks, packed[0].numel())
        return [messages], partial(self._encoding.unpack_weights, messages, outputs, self._encoded_widths)

    @property
    def _encoding(self) -> GatherEncoding | None:
        return next((parameter.encoding for parameter in self.parameters if parameter.encoding), None)

    @property
    def _encoded_widths(self) -> list[int]:
        return [parameter.encoded_width for parameter in self.parameters]

    def gather(self) -> None:
        """Gather the parameters and set them in the modules; on a GPU only the current stream waits."""
        self.start_gather()
        if self._gather is not None:
            self._gather.wait()
            self._gather, self.state = None, "gathered"
            for parameter in self.parameters:
                parameter.set_in_modules(parameter.unsharded)

    def free(self) -> None:
        """Free the gathered parameters, and set the slices in the modules."""
        if self.state == "gathering":
            self.gather()  # memory must not be freed while other ranks write to it
        if self.state == "gathered":
            self.state = "freed"
            for parameter in self.parameters:
                parameter.set_in_modules(parameter.sharded)
            self._storage.resize_(0)

    def start_reduction(self, over_replicas: bool) -> "StartedReduction":
        """
        Start to sum the gradients over shards, and then over replicas if `over_replicas`; the unit has trained
        parameters. One without a gradient contributes zeros, so all ranks send the same messages.
        """
        shapes = [parameter.tensor_slice.shape for parameter in self.trained]
        gradients = [parameter.take_gradient() for parameter in self.trained]
        started = start_sum(
            gradients,
            shapes,
            self.dtypes.message,
            self.parameters[0].master.device,
            self.groups.shards,
            self.exchange_parts,
        )
        return StartedReduction(self, started, over_replicas)

    def add_sums_to_masters(self, sums: Tensor) -> None:
        """Add sums, (n,) with one padded slice after another, to the masters' gradients."""
        ranks = self.groups.shards.size()
        sizes = [parameter.message.numel() // ranks for parameter in self.trained]
        for parameter, part in zip(self.trained, torch.split(sums, sizes), strict=True):
            master = parameter.master
            gradient = part[: master.numel()].view(master.shape)
            master.grad = gradient.to(master.dtype) if master.grad is None else master.grad.add_(gradient)

    def add_to_sums_of_shards(self, sums: Tensor, is_final: bool) -> Tensor:
        """Return sums (n,) plus the earlier microbatches'; keep the result unless it `is_final`."""
        total = sums if self._sums_of_shards is None else sums.add_(self._sums_of_shards)
        self._sums_of_shards = None if is_final else total
        return total


@attrs.define(eq=False)
class StartedReduction:
    """A unit's gradients on their way to the ranks with the slices, and then to the replicas: up to two collectives."""

    unit: ShardUnit
    started: StartedSum
    over_replicas: bool
    _sums: Tensor | None = None
    """Sums over shards while replicas add them up, (n,); None before."""
    _work: Any = None

    @torch.no_grad()
    def wait_and_continue(self) -> bool:
        """
        Wait for the collective in progress, and start the next; return False after the last. On a GPU only the current
        stream waits.

        The sums are then in the masters' gradients; or, if the unit has replicas and this reduction is not over them,
        in the unit, for a later microbatch's reduction over replicas.
        """
        if self._sums is not None:
            self._work.wait()
            self.unit.add_sums_to_masters(self._sums)
            return False
        sums, replicas = self.started.wait(), self.unit.groups.replicas
        if replicas is None:
            self.unit.add_sums_to_masters(sums)
            return False
        total = self.unit.add_to_sums_of_shards(sums, is_final=self.over_replicas)
        if not self.over_replicas:
            return False
        self._sums, self._work = total, dist.all_reduce(total, group=replicas, async_op=True)
        return True


def count_gathered_bytes(units: Iterable[ShardUnit]) -> int:
    """Return the units' bytes while they are gathered."""
    return sum(parameter.unsharded.nbytes for unit in units for parameter in unit.parameters)
