"""The contract of what holds memory."""

from drawloom.components.ports.memory import MEMORY_KINDS, MemoryUser
from drawloom.graph.testing import expect


def memory_has_known_kinds(user: MemoryUser) -> None:
    """Each kind is one of MEMORY_KINDS, its bytes are a whole number of 0 or more, and asking changes nothing."""
    held = user.memory_bytes()
    for kind, size in held.items():
        expect(kind in MEMORY_KINDS, f"{kind!r} is none of {', '.join(MEMORY_KINDS)}")
        expect(isinstance(size, int) and size >= 0, f"{kind} are {size!r} bytes")
    expect(user.memory_bytes() == held, "the same question has two answers")
