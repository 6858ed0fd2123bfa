"""A launch's store, shared by all its processes, and the first failure of any rank in it."""

import json
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import attrs

T = TypeVar("T")


@attrs.frozen
class Failure:
    """The failed rank, its message, and the exit code for all ranks."""

    reporter: int
    text: str
    exit_code: int = 1


def set_short_dns_timeout_variable() -> None:
    """
    Let DNS requests of this process, and of those that it starts, be repeated after 1 s rather than 5 s.

    torch's store looks up the name of every address that connects, and answers nobody meanwhile (torch 2.13). This must
    come before the process's first lookup. Lost packets cost a recovery 5 s otherwise.
    """
    os.environ.setdefault("RES_OPTIONS", "timeout:1")


def connect_to_launch_store(address: str, port: int, key_prefix: str, seconds: float) -> Any:
    """Return a new connection to this launch's store; `key_prefix` is its key prefix, unique to the launch."""
    # imported here, so that the command can import this module before it needs torch
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))
    return PrefixStore(f"drawloom/{key_prefix}", store)


def call_store_with_timeout(seconds: float, request: Callable[[], T]) -> T | None:
    """Return `request`'s result, a call to a store; None if the store is gone or does not answer in time."""
    results: list[T] = []

    def try_to_record_result() -> None:
        try:
            results.append(request())
        except RuntimeError:  # torch's errors of stores and of the network
            return

    # a store call can't be cancelled: a daemon thread may stay blocked in it without keeping the process alive
    thread = threading.Thread(target=try_to_record_result, name="store", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def claim_first_failure(store: Any, failure: Failure) -> Failure:
    """Set the failure in the store unless one is already set, and return the failure in the store."""
    # compare_set is atomic: of ranks that fail at the same moment, exactly one reads its own value back
    kept = store.compare_set("failure", "", json.dumps(attrs.asdict(failure)))
    return Failure(**json.loads(kept))
