"""Garbage collection: a pause while many long-lived objects are created, and the freeing of closed graphs."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """
    Disable automatic collection in the body, or in a decorated function. Afterwards enable it if it was enabled.

    Recipes and graphs make no cycles to collect, but creating objects triggers collections, and every collection walks
    all earlier objects: a third of the time for 10,000 nodes.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def free_closed_graphs() -> None:
    """Free closed graphs' cycles, for example of FSDP, which an automatic collection would find late."""
    # The first collection frees objects that refer to cycles from outside of Python, such as autograd's nodes, and the
    # second one those cycles, such as modules.
    gc.collect()
    gc.collect()
