"""Contract for the port of memory users."""

from drawloom.graph.testing import expect
from drawloom.ports import MEMORY_KINDS, MemoryUser


def memory_bytes_are_nonnegative_and_of_known_kinds(user: MemoryUser) -> None:
    """Kinds are among MEMORY_KINDS, bytes are nonnegative integers, and a second call returns the same."""
    sizes = user.device_bytes()
    for kind, size in sizes.items():
        expect(kind in MEMORY_KINDS, f"{kind!r} is none of {', '.join(MEMORY_KINDS)}")
        expect(isinstance(size, int) and size >= 0, f"{kind} are {size!r} bytes")
    expect(user.device_bytes() == sizes, "the same question has two answers")
