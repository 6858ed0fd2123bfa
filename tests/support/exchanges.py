"""Rows whose tokens two threads share, in place of the ranks of context parallelism."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class Exchange:
    """Places of the tokens of both threads, and the exchanged tensors."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.token_indices = first, second
        self.barrier = Barrier(2)
        self.parts: list[Tensor] = [torch.empty(0)] * 2


class ThreadPart:
    """One thread's tokens of each row: the ends of the row, or its middle. Both threads gather them."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.exchange, self.rank = exchange, rank
        self.token_indices = exchange.token_indices[rank]

    @property
    def piece_indices(self) -> tuple[int, ...]:
        return self.rank, 3 - self.rank

    def gather(self, part: Tensor) -> Tensor:
        return torch.cat(self._swap(part), 1)[:, torch.cat(self.exchange.token_indices).argsort()]

    def gather_pieces(self, own: Tensor) -> Tensor:
        ends, middle = self._swap(own)
        return torch.cat([ends[:, :1], middle, ends[:, 1:]], 1)

    def start_gathering_others(self, own: Tensor) -> Callable[[], Tensor]:
        others = self._swap(own)[1 - self.rank]
        return lambda: others

    def start_summing_for_owners(self, others: Tensor) -> Callable[[], Tensor]:
        return self.start_gathering_others(others)

    def _swap(self, own: Tensor) -> list[Tensor]:
        self.exchange.parts[self.rank] = own
        self.exchange.barrier.wait(60)
        parts = [*self.exchange.parts]
        self.exchange.barrier.wait(60)
        return parts


def run_threads(function: Callable[[int], Result]) -> list[Result]:
    """Return the results of a function for ranks 0 and 1, in threads."""
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(function, range(2)))


def list_ring_edges(size: int) -> list[tuple[int, int]]:
    """Return a ring's edges: every index with the next, and the last with the first."""
    return [(index, (index + 1) % size) for index in range(size if size > 2 else size - 1)]
