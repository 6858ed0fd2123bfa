"""Ranks, groups of them, and what they compute on."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from drawloom.graph import port


class Group(Protocol):
    """Some ranks that act together. A group of one costs nothing."""

    @property
    def rank(self) -> int:
        """This rank's place in the group, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        ...

    def sum(self, tensor: Tensor) -> None:
        """Replace a tensor, in place, by its sum over the ranks."""
        ...

    def max(self, tensor: Tensor) -> None:
        """Replace a tensor, in place, by its maximum over the ranks."""
        ...

    def gather_json(self, value: Any) -> list[Any]:
        """What each rank gave, as JSON carries it, by rank, on every rank."""
        ...


class Pending(Protocol):
    """A send or receive that is under way."""

    def is_completed(self) -> bool:
        """Whether the tensor has been sent or received."""
        ...

    def wait(self) -> None:
        """
        Wait until it is completed; where the device is a GPU, its current stream waits and not the host.

        Raises a UserError if the peer is gone or takes too long.
        """
        ...


class Communicator(Protocol):
    """
    One direction between two ranks: one of them sends, the other receives.

    Tensors arrive in the order in which they were sent. They are contiguous, of the shape and dtype that the receiver
    gives, and stay as they are until their work is completed.
    """

    def send(self, tensor: Tensor) -> Pending: ...

    def receive(self, tensor: Tensor) -> Pending: ...


class P2PChannel(Protocol):
    """A communicator to a peer and one from it, so that neither direction ever waits for the other."""

    def send(self, tensor: Tensor) -> Pending: ...

    def receive(self, tensor: Tensor) -> Pending: ...


@port
class Processes(Protocol):
    """The processes that were started together, this one among them."""

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        ...

    @property
    def local_rank(self) -> int:
        """This process's number on its machine, from 0."""
        ...

    @property
    def local_world_size(self) -> int:
        """How many of the processes run on this machine."""
        ...

    def group(self, name: str, sets: Sequence[Sequence[int]]) -> Group:
        """
        A group for each of these sets of ranks; gives the one that this process is in.

        The sets are disjoint and hold every rank. All processes ask for the same groups in the same order.
        """
        ...

    def communicator(self, name: str, sender: int, receiver: int) -> Communicator:
        """
        The one-way communicator of this name between two ranks, of which this is one; connected when first asked for.

        Both ranks ask; where ranks ask for several, all follow one order, or they wait for each other for ever.
        """
        ...

    def control_group(self, name: str) -> Group:
        """
        All processes, on CPUs and by a communicator of their own: a thread may use it whatever the others are doing.

        It waits for the others as long as they live. All processes ask for the same groups in the same order.
        """
        ...


@port
class Timed(Protocol):
    """Whoever makes the groups in which ranks wait for one another."""

    def set_timeout(self, seconds: float) -> None:
        """From now on a rank waits this long for the others in any group, and then fails; alone it waits for nobody."""
        ...

    def set_location(self, place: str) -> None:
        """Where this rank is, for the others to be told if it keeps them waiting."""
        ...

    def diagnose(self) -> str:
        """Who keeps the others waiting, in words, as far as it can be known; empty if it can't. It takes a second."""
        ...

    def fail(self, text: str) -> None:
        """Tell why this rank ends, unless another one was first, and let all others end."""
        ...


@port
class Mesh(Protocol):
    """The ranks of a run, laid out in named dimensions."""

    @property
    def world(self) -> Group:
        """All ranks."""
        ...

    @property
    def replicas(self) -> Group:
        """The ranks that hold the same parameters as this one and see other data."""
        ...

    def group(self, dimension: str) -> Group:
        """The ranks that differ from this one only in where they lie along a dimension."""
        ...

    def size(self, dimension: str) -> int:
        """How many ranks lie along `pipeline`, `data_replicate`, `data_shard`, `context`, `tensor` or `expert`."""
        ...

    def index(self, dimension: str) -> int:
        """Where this rank lies along a dimension."""
        ...


@port
class Neighbours(Protocol):
    """Point-to-point links inside the mesh."""

    def links(self, dimension: str, edges: Iterable[tuple[int, int]]) -> Mapping[int, P2PChannel]:
        """Links along a dimension between these pairs of indices, by the peer's index. All ranks ask together."""
        ...


@port
class Device(Protocol):
    """What tensors live on."""

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        ...

    @property
    def backend(self) -> str:
        """How ranks on this device talk: `gloo` or `nccl`."""
        ...

    def memory(self) -> int:
        """The most bytes in use so far by this process: device memory, or resident memory on a CPU."""
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
    """Adds up, over the ranks that hold different parameters, a number that each computed over its own."""

    def total(self, value: Tensor) -> Tensor:
        """The sum over ranks of a float64 tensor."""
        ...
