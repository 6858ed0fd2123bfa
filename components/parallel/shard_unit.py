"""
FSDP units: parameters in slices on several ranks, gathered, freed and reduced together.

A module has a parameter's slice, a DTensor along its first dimension, or while the unit is gathered the whole
parameter. The whole parameter is one object for the run, and the unit's memory is freed in between, so tensors saved by
autograd are valid again after the next gather. Zhao et al. 2023, "PyTorch FSDP", arXiv 2304.11277; slices are as in
torch's `fully_shard`, without its private names, because these change with every release.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod
from typing import Any, Literal

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from drawloom import internal
from drawloom.components.parallel.data_shard import get_local_slice, slice_rows
from drawloom.components.parallel.shard_transfers import (
    StartedGather,
    StartedSum,
    count_slice_elements,
    start_encoded_gather,
    start_gather,
    start_sum,
)
from drawloom.ports import GatherEncoding, LinearLayer, TensorSlice

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


@attrs.define(eq=False)
class ShardUnit:
    """Parameters gathered by one collective, and reduced by another; there may be none."""

    parameters: Sequence[ShardedParameter]
    groups: ShardGroups
    dtypes: UnitDtypes
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
        if self.state != "freed" or not self.parameters:
            return
        self.state = "gathering"
        self._storage.resize_(self._bytes)
        slices = [parameter.master.detach() for parameter in self.parameters]
        messages = [parameter.message for parameter in self.parameters]
        encoding = next((parameter.encoding for parameter in self.parameters if parameter.encoding), None)
        if encoding is None:
            self._gather = start_gather(slices, messages, self.groups.shards)
        else:
            widths = [parameter.encoded_width for parameter in self.parameters]
            self._gather = start_encoded_gather(slices, messages, encoding, widths, self.groups.shards)

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
        Start to sum the gradients over shards, and then over replicas if `over_replicas`. A parameter without a
        gradient contributes zeros, so all ranks send the same messages.
        """
        shapes = [parameter.tensor_slice.shape for parameter in self.trained]
        gradients = [parameter.take_gradient() for parameter in self.trained]
        started = start_sum(
            gradients, shapes, self.dtypes.message, self.parameters[0].master.device, self.groups.shards
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
    """A unit's gradients on their way to the ranks with the slices, and then to the replicas."""

    unit: ShardUnit
    started: StartedSum
    over_replicas: bool
    _sums: Tensor | None = None
    _work: Any = None

    @torch.no_grad()
    def wait_and_continue(self) -> bool:
        """
        Wait for the collective in progress, and start the next; return False after the last, with the sums in the
        masters' gradients. On a GPU only the current stream waits.
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
