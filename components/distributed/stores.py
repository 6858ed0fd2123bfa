"""Stores of torch, in which processes that were started together leave words for one another."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

T = TypeVar("T")


def connect(address: str, port: int, name: str, seconds: float) -> Any:
    """The store of the processes that were started together, by a connection of its own; `name` is this start's."""
    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))
    return PrefixStore(f"drawloom/{name}", store)


def within(seconds: float, work: Callable[[], T]) -> T | None:
    """What `work` gives, which asks a store; None if the store is gone, or does not answer in this time."""
    found: list[T] = []

    def ask() -> None:
        try:
            found.append(work())
        except RuntimeError:  # torch's errors of stores and of the network
            return

    thread = threading.Thread(target=ask, name="store", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
