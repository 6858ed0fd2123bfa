"""Ports of process groups, the device mesh, the device, and dtypes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from drawloom.graph import port

DIMENSIONS = ("pipeline", "data_replicate", "data_shard", "context", "tensor")
"""Mesh dimensions, in the order in which ranks are numbered: their sizes multiply to the number of ranks."""


@attrs.frozen
class PerDimension:
    """
    A number for each mesh dimension.

    Experts see the ranks of a pipeline stage as expert_replicate x expert_shard x expert.
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
        """Return the numbers by name, without those of experts."""
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
        """Return the sizes in a mesh's settings; "auto" and a size that is left out are 1, the least it can be."""
        names = (*DIMENSIONS, "expert")
        return cls(**{name: size for name in names if isinstance(size := settings.get(name), int)})


class Group(Protocol):
    """A process group. In a group of one rank, collectives cost nothing."""

    @property
    def rank(self) -> int:
        """This rank's number in the group, from 0."""
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
        Begin `sum` of a contiguous tensor, of any shape and on the device of the ranks, which is not used meanwhile.
        """
        ...

    def max(self, tensor: Tensor) -> None:
        """All-reduce a tensor of any shape, in place, to the maximum over the ranks."""
        ...

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Write the tensor of a rank, by its number in the group, over those of the others: one shape and dtype."""
        ...

    def gather_json(self, value: Any) -> list[Any]:
        """All-gather a JSON value: the values of all ranks, by rank."""
        ...

    def gather(self, tensor: Tensor) -> Tensor:
        """All-gather tensors of one shape (...) and dtype: (size, ...), by rank."""
        ...

    def gather_each(self, tensor: Tensor) -> Sequence[Tensor]:
        """All-gather tensors of one dtype and number of dimensions, whose shapes (...) differ: by rank."""
        ...

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """The sum (...) over the ranks of the part for this rank; parts (size, ...) has one for each rank."""
        ...

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """
        The rows (sum(received), ...) that all ranks have for this one, by rank.

        rows: (sum(sent), ...), the first sent[0] of which are for rank 0; received[0] come from it. Numbers may be 0.
        """
        ...

    def symmetric_memory(self, size: int) -> "SymmetricMemory":
        """
        Memory of `size` bytes on each rank, on the device of the ranks, which all of them can read; all call this.

        Raises UserError where they can't, as on several hosts.
        """
        ...


class SymmetricMemory(Protocol):
    """As many bytes on each rank of a group, which all of its ranks can read and write."""

    @property
    def parts(self) -> Sequence[Tensor]:
        """The memory of each rank, by rank: uint8 (bytes,), all of one size; that of this rank is local."""
        ...

    def barrier(self) -> None:
        """
        Wait until all ranks call this: what comes after sees what they wrote before. On a GPU only the stream waits.
        """
        ...


class Pending(Protocol):
    """A send, receive, sum or gather in progress."""

    def is_completed(self) -> bool:
        """Whether the tensor has been sent, received, summed or gathered."""
        ...

    def wait(self) -> None:
        """
        Wait for completion; on a GPU only the current stream waits, not the host.

        Raises a UserError if the peer is gone or takes too long.
        """
        ...


class P2PChannel(Protocol):
    """
    Both directions between this rank and a peer, neither of which ever waits for the other.

    Tensors of a direction arrive in the order in which they were sent. They are contiguous, of the shape and dtype of
    the receiver's tensor, and must not be changed until the transfer is completed.
    """

    def send(self, tensor: Tensor) -> Pending:
        """Start to send a contiguous tensor of any shape and dtype."""
        ...

    def receive(self, tensor: Tensor) -> Pending:
        """Start to receive into a contiguous tensor of any shape and dtype."""
        ...


@port
class Processes(Protocol):
    """The processes of a launch, of which this is one."""

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
        """The number of this machine among those of the launch, from 0."""
        ...

    @property
    def node_count(self) -> int:
        """The number of machines of the launch."""
        ...

    def group(self, name: str, sets: Sequence[Sequence[int]]) -> Group:
        """
        Make a group for each of these sets of ranks; the one that this process is in.

        The sets are disjoint and hold every rank. All processes make the same groups in the same order.
        """
        ...

    def channel(self, name: str, first: int, second: int) -> P2PChannel:
        """
        Return the channel of this name between two ranks, one of which is this one; connected at the first call.

        Both ranks call this with the same arguments; ranks that make several follow one order, or they deadlock.
        """
        ...

    def control_group(self, name: str) -> Group:
        """
        A separate CPU group of all processes, which a background thread may use during other collectives.

        It has no timeout. All processes make the same groups in the same order.
        """
        ...


@port
class Timed(Protocol):
    """Timeouts of collectives, and the diagnosis of hangs and failures."""

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout of collectives and transfers, for groups that exist and those that are made later."""
        ...

    def set_location(self, location: str) -> None:
        """Set the step and phase of this rank that a hang diagnosis and a failure name."""
        ...

    def diagnose(self) -> str:
        """Which ranks keep the others waiting, as a message; empty if unknown. Takes about a second."""
        ...

    def fail(self, text: str) -> None:
        """Report a failure of this rank, which ends all ranks."""
        ...


@port
class Mesh(Protocol):
    """The device mesh: the ranks of a run, laid out in named dimensions."""

    @property
    def world(self) -> Group:
        """All ranks."""
        ...

    @property
    def replicas(self) -> Group:
        """The ranks that hold the same parameters as this one and see other data."""
        ...

    def group(self, *dimensions: str) -> Group:
        """
        The ranks that differ from this one only in their indices along these dimensions, in the order of all ranks.

        All ranks of the group ask for it in the same order as for others: the first time, it is made.
        """
        ...

    def torch_mesh(self, *dimensions: Sequence[str]) -> Any:
        """Return torch's DeviceMesh, each dimension of which is `group(*names)` for some names of dimensions."""
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
        """The ranks that hold the other layers of this rank's copy of the model."""
        ...

    @property
    def context_group(self) -> Group:
        """The ranks with other tokens of the same rows."""
        ...

    @property
    def tensor_group(self) -> Group:
        """The ranks that share every matrix product with this one."""
        ...

    @property
    def expert_group(self) -> Group:
        """The ranks with other experts of the same layers."""
        ...

    @property
    def data_group(self) -> Group:
        """The ranks with other tokens: losses and token counts are summed over them."""
        ...

    @property
    def shard_group(self) -> Group:
        """The ranks over which FSDP shards parameters: each computes with all of them, on its own tokens."""
        ...

    @property
    def model_group(self) -> Group:
        """The ranks that hold one copy of the model together."""
        ...

    @property
    def expert_data_group(self) -> Group:
        """The ranks with the same experts and other tokens."""
        ...

    @property
    def data_tensor_group(self) -> Group:
        """The ranks with the same layers: those of `data_group`, each with its `tensor_group`."""
        ...


@port
class Neighbours(Protocol):
    """P2P channels inside the mesh."""

    def links(self, edges: Iterable[tuple[int, int]]) -> Mapping[int, P2PChannel]:
        """
        Return P2P channels between pairs of pipeline ranks, those of this rank by the peer's index.

        A collective of all ranks.
        """
        ...


@port
class Device(Protocol):
    """The device of tensors, and the backend of its ranks."""

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        ...

    @property
    def backend(self) -> str:
        """The backend of torch.distributed: `gloo` or `nccl`."""
        ...

    def memory(self) -> int:
        """Peak memory of this process so far, in bytes: allocated by torch on a GPU, resident (RSS) on a CPU."""
        ...


@port
class Precision(Protocol):
    """In which dtype each kind of number is kept."""

    @property
    def parameter(self) -> torch.dtype:
        """Of parameters, as the optimizer and checkpoints keep them."""
        ...

    @property
    def compute(self) -> torch.dtype:
        """Of activations, and of the copies of parameters that layers multiply with."""
        ...

    @property
    def gradient(self) -> torch.dtype:
        """Of gradients, summed over the microbatches of a step."""
        ...

    @property
    def reduce(self) -> torch.dtype:
        """Of sums over ranks, at least: wider numbers stay as wide as they are."""
        ...

    @property
    def uncast(self) -> Sequence[str]:
        """Patterns (fnmatch) of names of parameters that layers use in the parameter dtype."""
        ...


@port
class Reduce(Protocol):
    """Sums and maxima over the ranks that hold different parameters, such as of a squared norm."""

    def total(self, value: Tensor) -> Tensor:
        """The sum over ranks of a float64 tensor of any shape, as a new tensor."""
        ...

    def largest(self, value: Tensor) -> Tensor:
        """The maximum over ranks of a float64 tensor of any shape, as a new tensor."""
        ...
