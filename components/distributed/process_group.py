"""Ranks that act together: one alone, or several over torch's collectives."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drawloom.components.distributed.hang_diagnosis import HangMonitor
from drawloom.graph import UserError


class SingleProcess:
    """A group of one: everything is there already."""

    rank = 0
    size = 1

    def sum(self, tensor: Tensor) -> None:
        """The tensor is its own sum."""

    def max(self, tensor: Tensor) -> None:
        """The tensor is its own maximum."""

    def gather_json(self, value: Any) -> list[Any]:
        """The value, as JSON carries it."""
        return [json.loads(json.dumps(value))]


class TorchGroup:
    """
    Several processes, over a group of torch.distributed.

    `name` and `ranks` are for messages, `device` is where the backend wants tensors; others travel by way of it. A
    process that fails or goes away is a UserError on the others, who learn by the roll which it is.
    """

    def __init__(
        self, name: str, ranks: Sequence[int], handle: Any, device: torch.device, roll: HangMonitor | None = None
    ) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self._handle = handle
        self.device = device
        self._roll = roll or HangMonitor(0, 1)

    @property
    def rank(self) -> int:
        """This rank's place in the group, from 0."""
        return dist.get_rank(self._handle)

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self.ranks)

    def sum(self, tensor: Tensor) -> None:
        """Replace a tensor, in place and in its own dtype, by its sum over the ranks."""
        self._reduce(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> None:
        """Replace a tensor, in place and in its own dtype, by its maximum over the ranks."""
        self._reduce(tensor, dist.ReduceOp.MAX)

    def gather_json(self, value: Any) -> list[Any]:
        """What each rank gave, as JSON carries it, by rank, on every rank."""
        text = json.dumps(value).encode()
        length = torch.tensor([len(text)], dtype=torch.int64, device=self.device)
        lengths = [int(each) for each in self._gather(length)]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        texts = self._gather(padded.to(self.device))
        return [json.loads(each[:n].cpu().numpy().tobytes()) for each, n in zip(texts, lengths, strict=True)]

    @torch.no_grad()
    def _reduce(self, tensor: Tensor, operation: Any) -> None:
        travelling = tensor.detach().to(self.device).contiguous()
        with peer_errors(self._roll, "a reduction", self.name, self.ranks):
            dist.all_reduce(travelling, operation, group=self._handle)
        if travelling.data_ptr() != tensor.data_ptr() or travelling.device != tensor.device:
            tensor.copy_(travelling)

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in self.ranks]
        with peer_errors(self._roll, "an exchange", self.name, self.ranks):
            dist.all_gather(gathered, tensor, group=self._handle)
        return gathered


@contextmanager
def peer_errors(roll: HangMonitor, deed: str, name: str, ranks: Sequence[int]) -> Iterator[None]:
    """Notes what this rank waits for, and turns torch's errors of a group of ranks into a UserError that names it."""
    roll.blocked_in = deed, name
    try:
        yield
    except RuntimeError as error:
        cause = roll.diagnose() or "most likely another process stopped"
        raise UserError(
            f"{deed} in group {name} (ranks {', '.join(map(str, ranks))}) failed on rank {dist.get_rank()}: {cause}; "
            f"see its log. torch says: {str(error).strip().splitlines()[0]}"
        ) from error
    finally:
        roll.blocked_in = None
