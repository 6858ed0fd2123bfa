"""Ports for process groups, the device mesh, the device, and dtypes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from drawloom import port

DIMENSIONS = ("pipeline", "data_replicate", "data_shard", "context", "tensor")
"""Mesh dimensions in the order of the rank numbering; the product of their sizes is the number of ranks."""


@attrs.frozen
class PerDimension:
    """
    One number per mesh dimension.

    A pipeline stage's ranks also form the expert dimensions expert_replicate x expert_shard x expert.
    """

    pipeline: int = 1
    data_replicate: int = 1
    data_shard: int = 1
    context: int = 1
    tensor: int = 1
    expert_replicate: int = 1
    expert_shard: int = 1
    expert: int = 1

    def without_expert_dimensions(self) -> dict[str, int]:
        """Return the numbers by dimension name, without the dimensions for expert parallelism."""
        return {name: getattr(self, name) for name in DIMENSIONS}

    @classmethod
    def of_first_rank(cls) -> "PerDimension":
        """Return the first rank's indices: 0 along every dimension."""
        return cls(**dict.fromkeys(attrs.fields_dict(cls), 0))

    def settings(self) -> dict[str, int]:
        """Return the numbers by the mesh's setting names, such as `tensor` and `expert`."""
        return {**self.without_expert_dimensions(), "expert": self.expert}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "PerDimension":
        """Return the sizes in a mesh's settings; "auto" and omitted sizes count as 1, the smallest size."""
        names = (*DIMENSIONS, "expert")
        return cls(**{name: size for name in names if isinstance(size := settings.get(name), int)})


class Group(Protocol):
    """Process group. With one rank, collectives cost nothing."""

    @property
    def rank(self) -> int:
        """This rank's index in the group, from 0."""

    @property
    def size(self) -> int:
        """Rank count."""

    @property
    def device(self) -> torch.device:
        """Device of exchanged tensors; others are copied there and back."""

    def sum(self, tensor: Tensor) -> None:
        """All-reduce a tensor, in place and with any shape, to the sum over ranks."""

    def start_sum(self, tensor: Tensor) -> "Pending":
        """
        Start `sum` for a contiguous tensor with any shape, on the ranks' device.

        The tensor must not be used until the sum is completed.
        """

    def max(self, tensor: Tensor) -> None:
        """All-reduce a tensor, in place and with any shape, to the maximum over ranks."""

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """
        Copy the tensor on the group's rank `source` into all other ranks' tensors; shapes and dtypes are equal.
        """

    def gather_json(self, value: Any) -> list[Any]:
        """All-gather a JSON value, and return all values in rank order."""

    def gather(self, tensor: Tensor) -> Tensor:
        """All-gather tensors with one shape (...) and dtype: (size, ...), in rank order."""

    def start_gather(self, tensor: Tensor) -> "tuple[Tensor, Pending]":
        """Start `gather` for a tensor on the ranks' device; its result must not be used until it is completed."""

    def gather_unequal_shapes(self, tensor: Tensor) -> Sequence[Tensor]:
        """
        All-gather tensors with one dtype and dimension count, but different shapes (...); return them in rank order.
        """

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """
        Sum `parts`, (size, ...), over ranks, and return this rank's part (...).
        """

    def start_reduce_scatter(self, parts: Tensor) -> "tuple[Tensor, Pending]":
        """Start `reduce_scatter` on the ranks' device; its result must not be used until it is completed."""

    def start_shift(self, sent: Tensor, received: Tensor, distance: int) -> "Pending":
        """
        Start to send a tensor to the rank `distance` further on, cyclically, and to receive another one from the rank
        as far behind.

        Both are contiguous and on the ranks' device, with one shape and dtype, and must not be used until then.
        """

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """
        Exchange rows with all ranks; return the received rows (sum(received), ...) in rank order.

        rows: (sum(sent), ...); the first sent[0] rows go to rank 0, and received[0] rows come from it. Counts may be 0.
        """

    @property
    def may_break(self) -> bool:
        """Whether the run survives a lost rank; collectives on a GPU then have wrong results, and raise nothing."""

    def raise_if_broken(self) -> None:
        """
        Raise UserError if ranks are lost, and the run continues without them; no communication.

        Long computations call this between their parts: their result would be of no use.
        """

    def wait_and_raise_if_broken(self) -> None:
        """
        Raise UserError if ranks are lost, and the run survives it; otherwise all results so far are right.

        If results may be wrong without an error, this waits for the rank's device.
        """

    def allocate_symmetric_memory(self, size: int) -> "SymmetricMemory":
        """
        Allocate `size` bytes on each rank's device, readable and writable by all ranks; a collective.

        Raises UserError if ranks can't reach one another's memory, for example on several hosts.
        """


class SymmetricMemory(Protocol):
    """Equally large memory on every rank, readable and writable by the whole group."""

    @property
    def parts(self) -> Sequence[Tensor]:
        """Memory by rank, in rank order: uint8 (bytes,) with equal sizes; this rank's memory is local."""

    def barrier(self) -> None:
        """Wait until all ranks call this; later reads see all earlier writes. On a GPU only the stream waits."""


class Pending(Protocol):
    """A send, receive, sum or gather in progress."""

    def is_completed(self) -> bool:
        """Return whether the transfer or the collective is completed."""

    def wait(self) -> None:
        """
        Wait for completion; on a GPU only the current stream waits, not the host.

        Raises UserError if the peer is gone or takes too long.
        """


class P2PChannel(Protocol):
    """
    Point-to-point channel to a peer, with two independent directions: sends never wait for receives.

    Tensors arrive in the order sent. They are contiguous, match the shape and dtype on the receiving side, and must not
    be changed until the transfer is completed.
    """

    def send(self, tensor: Tensor) -> Pending:
        """Start to send a contiguous tensor, any shape and dtype."""

    def receive(self, tensor: Tensor) -> Pending:
        """Start to receive into a contiguous tensor, any shape and dtype."""


@port
class Processes(Protocol):
    """A launch's processes, seen from this process."""

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""

    @property
    def world_size(self) -> int:
        """Process count."""

    @property
    def node_rank(self) -> int:
        """This machine's index in the launch, from 0."""

    @property
    def node_count(self) -> int:
        """Machine count."""

    def make_group(self, name: str, rank_sets: Sequence[Sequence[int]]) -> Group:
        """
        Make one process group per set of ranks, and return this process's group.

        The sets are disjoint and contain every rank. All processes make the same groups in the same order.
        """

    def open_channel(self, name: str, first: int, second: int) -> P2PChannel:
        """
        Return the named channel between this rank and another, connected at the first call.

        `first` and `second` are the two ranks. Both call this with the same arguments; ranks that make several channels
        follow one order, or they deadlock.
        """

    def make_control_group(self, name: str) -> Group:
        """
        Make a separate CPU group with all processes, for a background thread during other collectives.

        The group has no timeout. All processes make the same groups in the same order.
        """

    @property
    def survives_rank_losses(self) -> bool:
        """Whether the run continues after a loss."""

    @property
    def generation(self) -> int:
        """How often processes have left or joined the run; with the first, the mesh's replica count may differ."""

    @property
    def remaining_shards(self) -> int | None:
        """The number of shards that are left in a replica, in place of the mesh's `data_shard`; None if all are."""

    def set_replica_shape(self, stages: int, shards: int, shard_size: int, expert: int) -> None:
        """
        Set the shape of a replica, as the mesh does in the first generation.

        It has `stages` pipeline stages of `shards` shards (`data_shard`) with `shard_size` ranks. Experts are
        partitioned over `expert` ranks.
        """

    def can_grow_with_spares(self, state_bytes: int) -> bool:
        """
        Return whether enough processes wait to join; False on all ranks but the first.

        They receive a state of about `state_bytes`, for which hot spares allocate memory in advance.
        """

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout for collectives and transfers, in existing and future groups."""

    def record_step_and_phase(self, location: str) -> None:
        """Record what this rank is doing, a step and a phase, for messages about hangs and failures."""

    def diagnose_hang(self) -> str:
        """Return a message that names the ranks for which others wait, or "" if unknown. Takes about a second."""

    def fail_ranks_and_must_exit(self, text: str) -> bool:
        """
        End all ranks' processes with `text` as this rank's error message; return whether this process has to end.

        If the run survives losses, only the ranks end for which the others wait.
        """


@port
class ReplicaLimit(Protocol):
    """A node whose work can't be shared by every number of replicas, such as a batch of rows."""

    def supports_replica_count(self, count: int) -> bool:
        """Return whether `count` data-parallel ranks (DDP × FSDP) can share the work; called before the node opens."""


@port
class Mesh(Protocol):
    """Device mesh: all ranks, arranged in named dimensions."""

    @property
    def world(self) -> Group:
        """All ranks."""

    @property
    def replica_group(self) -> Group:
        """The ranks with the same parameters as this rank and other data: DDP's replicas."""

    def group(self, *dimensions: str) -> Group:
        """
        Return the ranks that differ from this rank only along `dimensions`, in ascending order.

        The first call makes the group. All its ranks request their groups in the same order.
        """

    def create_torch_mesh(self, *dimensions: Sequence[str]) -> Any:
        """
        Return torch's DeviceMesh with one dimension per argument: the ranks in `group(*names)` for the argument's
        names.
        """

    @property
    def sizes(self) -> PerDimension:
        """Rank counts by dimension."""

    @property
    def indices(self) -> PerDimension:
        """This rank's index by dimension."""

    @property
    def pipeline_group(self) -> Group:
        """The ranks with the other layers in this rank's model copy (pipeline parallelism)."""

    @property
    def context_group(self) -> Group:
        """The ranks with other tokens from the same rows (context parallelism)."""

    @property
    def tensor_group(self) -> Group:
        """The ranks that share every matrix product with this rank (tensor parallelism)."""

    @property
    def expert_group(self) -> Group:
        """The ranks with other experts from the same layers (expert parallelism)."""

    @property
    def data_group(self) -> Group:
        """The ranks with other tokens, over which losses and token counts are summed."""

    @property
    def shard_group(self) -> Group:
        """The ranks over which FSDP (ZeRO) shards parameters; every rank gathers all parameters for its own tokens."""

    @property
    def model_copy_group(self) -> Group:
        """The ranks that together have one model copy."""

    @property
    def expert_data_group(self) -> Group:
        """The ranks with the same experts and other tokens."""

    @property
    def data_tensor_group(self) -> Group:
        """The ranks with the same layers: `data_group`, joined with its ranks' `tensor_group`."""

    def open_channels(self, edges: Iterable[tuple[int, int]]) -> Mapping[int, P2PChannel]:
        """
        Return this rank's channels for `edges`, pairs of pipeline ranks, by the peer's index; a collective of all
        ranks.
        """


@port
class Device(Protocol):
    """Device for this rank's tensors, and backend for its collectives."""

    @property
    def device(self) -> torch.device:
        """This rank's device."""

    @property
    def backend(self) -> str:
        """Backend for torch.distributed: `gloo` or `nccl`."""

    @property
    def shares_gpu(self) -> bool:
        """Whether processes on this machine share GPUs."""

    def make_current(self) -> None:
        """Make this rank's device torch's current one; a spare has no device before."""

    def get_peak_memory_so_far(self) -> int:
        """Return this process's peak memory so far, in bytes: allocated by torch on a GPU, resident (RSS) on a CPU."""


@port
class Precision(Protocol):
    """Dtypes of parameters, activations, gradients and reductions."""

    @property
    def parameter(self) -> torch.dtype:
        """Dtype for parameters in the optimizer and in checkpoints: the master weights, if `compute` is narrower."""

    @property
    def compute(self) -> torch.dtype:
        """Dtype for activations, and for the parameter copies that layers multiply with."""

    @property
    def gradient(self) -> torch.dtype:
        """Dtype for gradients, which are summed over a step's microbatches (gradient accumulation)."""

    @property
    def reduce(self) -> torch.dtype:
        """Smallest dtype for sums over ranks: wider numbers keep their own dtype."""

    @property
    def uncast(self) -> Sequence[str]:
        """Name patterns (fnmatch) for parameters that layers use in the parameter dtype."""


@port
class Reduce(Protocol):
    """Reductions over ranks with different parameters, for example for a squared norm."""

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """Sum a float64 tensor over ranks, any shape, into a new tensor."""

    def max_over_ranks(self, value: Tensor) -> Tensor:
        """Reduce a float64 tensor to its maximum over ranks, any shape, in a new tensor."""
