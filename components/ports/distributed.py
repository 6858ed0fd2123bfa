"""Ports of process groups, the device mesh, the device, and dtypes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import attrs
import torch
from torch import Tensor

from drawloom.graph import port

DIMENSIONS = ("pipeline", "data_replicate", "data_shard", "context", "tensor")
"""Mesh dimensions in the order of the rank numbering; the product of their sizes is the number of ranks."""


@attrs.frozen
class PerDimension:
    """
    A number for each mesh dimension.

    The ranks of a pipeline stage also form the expert dimensions expert_replicate x expert_shard x expert.
    """

    pipeline: int = 1
    data_replicate: int = 1
    data_shard: int = 1
    context: int = 1
    tensor: int = 1
    expert_replicate: int = 1
    expert_shard: int = 1
    expert: int = 1

    def dense(self) -> dict[str, int]:
        """Return the numbers by name, without the expert dimensions."""
        return {name: getattr(self, name) for name in DIMENSIONS}

    @classmethod
    def of_first_rank(cls) -> "PerDimension":
        """Return the indices of the first rank: 0 along every dimension."""
        return cls(**dict.fromkeys(attrs.fields_dict(cls), 0))

    def settings(self) -> dict[str, int]:
        """Return the numbers by the names of a mesh's settings."""
        return {**self.dense(), "expert": self.expert}

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any]) -> "PerDimension":
        """Return the sizes in a mesh's settings; "auto" and omitted sizes count as 1, the smallest possible size."""
        names = (*DIMENSIONS, "expert")
        return cls(**{name: size for name in names if isinstance(size := settings.get(name), int)})


class Group(Protocol):
    """A process group. In a group of one rank, collectives cost nothing."""

    @property
    def rank(self) -> int:
        """The index of this rank in the group, from 0."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        ...

    def sum(self, tensor: Tensor) -> None:
        """All-reduce a tensor of any shape, in place, to the sum over the ranks."""
        ...

    def start_sum(self, tensor: Tensor) -> "Pending":
        """
        Start `sum` of a contiguous tensor, of any shape and on the device of the ranks.

        The tensor must not be used until the sum is completed.
        """
        ...

    def max(self, tensor: Tensor) -> None:
        """All-reduce a tensor of any shape, in place, to the maximum over the ranks."""
        ...

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """
        Copy the tensor of rank `source` of the group into the tensors of all other ranks, of the same shape and dtype.
        """
        ...

    def gather_json(self, value: Any) -> list[Any]:
        """All-gather a JSON value and return the values of all ranks in rank order."""
        ...

    def gather(self, tensor: Tensor) -> Tensor:
        """All-gather tensors of one shape (...) and dtype: (size, ...), in rank order."""
        ...

    def gather_each(self, tensor: Tensor) -> Sequence[Tensor]:
        """All-gather tensors of one dtype and number of dimensions, with different shapes (...), in rank order."""
        ...

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """
        Return this rank's part (...) of the sum of `parts` over ranks. parts: (size, ...), one part for each rank.
        """
        ...

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """
        Exchange rows with all ranks; return the received rows (sum(received), ...) in rank order.

        rows: (sum(sent), ...); the first sent[0] rows go to rank 0, and received[0] rows come from it. Counts may be 0.
        """
        ...

    def symmetric_memory(self, size: int) -> "SymmetricMemory":
        """
        Allocate `size` bytes on each rank's device, readable and writable by all ranks; a collective.

        Raises UserError if ranks can't reach one another's memory, for example on several hosts.
        """
        ...


class SymmetricMemory(Protocol):
    """Memory of equal size on each rank of a group, which all ranks of the group can read and write."""

    @property
    def parts(self) -> Sequence[Tensor]:
        """The memory of each rank, in rank order: uint8 (bytes,) of equal size; this rank's memory is local."""
        ...

    def barrier(self) -> None:
        """Wait until all ranks call this; later reads see all earlier writes. On a GPU only the stream waits."""
        ...


class Pending(Protocol):
    """A send, receive, sum or gather in progress."""

    def is_completed(self) -> bool:
        """Return whether the transfer or the collective is completed."""
        ...

    def wait(self) -> None:
        """
        Wait for completion; on a GPU only the current stream waits, not the host.

        Raises UserError if the peer is gone or takes too long.
        """
        ...


class P2PChannel(Protocol):
    """
    Point-to-point channel with a peer, with two independent directions: sends never wait for receives.

    Tensors of a direction arrive in the order of the sends. They are contiguous, have the shape and dtype of the
    receiver's tensor, and must not be changed until the transfer is completed.
    """

    def send(self, tensor: Tensor) -> Pending:
        """Start to send a contiguous tensor of any shape and dtype."""
        ...

    def receive(self, tensor: Tensor) -> Pending:
        """Start to receive into a contiguous tensor of any shape and dtype."""
        ...


@port
class Processes(Protocol):
    """The processes of a launch, seen from this process."""

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """The number of processes of the launch."""
        ...

    @property
    def local_rank(self) -> int:
        """This process's rank on its machine, from 0."""
        ...

    @property
    def local_world_size(self) -> int:
        """The number of processes on this machine."""
        ...

    @property
    def node_rank(self) -> int:
        """The index of this machine in the launch, from 0."""
        ...

    @property
    def node_count(self) -> int:
        """The number of machines of the launch."""
        ...

    def group(self, name: str, sets: Sequence[Sequence[int]]) -> Group:
        """
        Make a process group for each set of ranks and return the group of this process.

        The sets are disjoint and contain every rank. All processes make the same groups in the same order.
        """
        ...

    def channel(self, name: str, first: int, second: int) -> P2PChannel:
        """
        Return the channel with this name between this rank and another, connected at the first call.

        `first` and `second` are the two ranks. Both call this with the same arguments; ranks that make several channels
        follow one order, or they deadlock.
        """
        ...

    def control_group(self, name: str) -> Group:
        """
        Make a separate CPU group of all processes, which a background thread may use during other collectives.

        The group has no timeout. All processes make the same groups in the same order.
        """
        ...


@port
class Timed(Protocol):
    """Timeouts of collectives, and diagnosis of hangs and failures."""

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout of collectives and transfers, for existing and future groups."""
        ...

    def set_location(self, location: str) -> None:
        """Set this rank's step and phase, which messages about hangs and failures name."""
        ...

    def diagnose(self) -> str:
        """Return a message that names the ranks for which others wait, or "" if unknown. Takes about a second."""
        ...

    def fail(self, text: str) -> None:
        """Report a failure of this rank and end all ranks."""
        ...


@port
class Mesh(Protocol):
    """Device mesh: the ranks of a run, arranged in named dimensions."""

    @property
    def world(self) -> Group:
        """All ranks."""
        ...

    @property
    def replicas(self) -> Group:
        """The ranks with the same parameters as this rank and other data: the replicas of DDP."""
        ...

    def group(self, *dimensions: str) -> Group:
        """
        Return the ranks that differ from this rank only in their indices along `dimensions`, in the order of all ranks.

        The first call makes the group. All its ranks request their groups in the same order.
        """
        ...

    def torch_mesh(self, *dimensions: Sequence[str]) -> Any:
        """
        Return torch's DeviceMesh with a dimension for each argument; its ranks are `group(*names)` of the argument's
        names.
        """
        ...

    @property
    def sizes(self) -> PerDimension:
        """The number of ranks along each dimension."""
        ...

    @property
    def indices(self) -> PerDimension:
        """The index of this rank along each dimension."""
        ...

    @property
    def pipeline_group(self) -> Group:
        """The ranks with the other layers of this rank's copy of the model."""
        ...

    @property
    def context_group(self) -> Group:
        """The ranks with other tokens of the same rows (context parallelism)."""
        ...

    @property
    def tensor_group(self) -> Group:
        """The ranks that share every matrix product with this rank (tensor parallelism)."""
        ...

    @property
    def expert_group(self) -> Group:
        """The ranks with other experts of the same layers (expert parallelism)."""
        ...

    @property
    def data_group(self) -> Group:
        """The ranks with other tokens, over which losses and token counts are summed."""
        ...

    @property
    def shard_group(self) -> Group:
        """The ranks over which FSDP shards parameters; each gathers all parameters and computes on its own tokens."""
        ...

    @property
    def model_group(self) -> Group:
        """The ranks that together have one copy of the model."""
        ...

    @property
    def expert_data_group(self) -> Group:
        """The ranks with the same experts and other tokens."""
        ...

    @property
    def data_tensor_group(self) -> Group:
        """The ranks with the same layers: `data_group`, with the `tensor_group` of each of its ranks."""
        ...


@port
class Neighbours(Protocol):
    """Point-to-point channels inside the mesh."""

    def links(self, edges: Iterable[tuple[int, int]]) -> Mapping[int, P2PChannel]:
        """
        Return this rank's channels for `edges`, pairs of pipeline ranks, by the peer's index; a collective of all
        ranks.
        """
        ...


@port
class Device(Protocol):
    """The device of this rank's tensors, and the backend of its collectives."""

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        ...

    @property
    def backend(self) -> str:
        """The backend of torch.distributed: `gloo` or `nccl`."""
        ...

    def memory(self) -> int:
        """Return this process's peak memory so far, in bytes: allocated by torch on a GPU, resident (RSS) on a CPU."""
        ...


LinearFormat = Literal["compute", "float8"]
"""Format of the operands of linear layers' matrix products: the compute dtype, or e4m3 with a scale for each row."""


@port
class Precision(Protocol):
    """Dtypes of parameters, activations, gradients and reductions, and the format of matrix products."""

    @property
    def parameter(self) -> torch.dtype:
        """Dtype of parameters in the optimizer and in checkpoints: the master weights, if `compute` is narrower."""
        ...

    @property
    def compute(self) -> torch.dtype:
        """Dtype of activations, and of the copies of parameters that layers multiply with."""
        ...

    @property
    def gradient(self) -> torch.dtype:
        """Dtype of gradients, which are summed over the microbatches of a step (gradient accumulation)."""
        ...

    @property
    def reduce(self) -> torch.dtype:
        """Smallest dtype of sums over ranks: wider numbers keep their own dtype."""
        ...

    @property
    def uncast(self) -> Sequence[str]:
        """Patterns (fnmatch) of the names of parameters that layers use in the parameter dtype."""
        ...

    @property
    def linear(self) -> LinearFormat:
        """Format of the operands of linear layers inside of blocks."""
        ...

    @property
    def linear_in_compute(self) -> Sequence[str]:
        """Patterns (fnmatch) of the names of linear layers whose products stay in the compute dtype."""
        ...


@port
class Reduce(Protocol):
    """Reductions over the ranks with different parameters, for example of a squared norm."""

    def total(self, value: Tensor) -> Tensor:
        """Return the sum over ranks of a float64 tensor of any shape, as a new tensor."""
        ...

    def largest(self, value: Tensor) -> Tensor:
        """Return the maximum over ranks of a float64 tensor of any shape, as a new tensor."""
        ...
