"""Contract for the port of memory users."""

from drawloom.graph.testing import expect
from drawloom.ports import MEMORY_KINDS, MemoryPolicy, MemoryUser


def memory_bytes_are_nonnegative_and_of_known_kinds(user: MemoryUser) -> None:
    """Kinds are among MEMORY_KINDS, bytes are nonnegative integers, and a second call returns the same."""
    sizes = user.device_bytes()
    for kind, size in sizes.items():
        expect(kind in MEMORY_KINDS, f"{kind!r} is none of {', '.join(MEMORY_KINDS)}")
        expect(isinstance(size, int) and size >= 0, f"{kind} are {size!r} bytes")
    expect(user.device_bytes() == sizes, "the same question has two answers")


def the_choice_is_made_once_and_names_known_stages(policy: MemoryPolicy) -> None:
    """
    Every stage has a policy, offloaded stages are among them, fractions are from 0 to 1, and a second call returns the
    same.
    """
    choice = policy.choose()
    stages = set(range(len(choice.recompute)))
    expect(stages, "there are no stages")
    expect(choice.offloaded <= stages, f"stages {sorted(choice.offloaded - stages)} are offloaded and do not exist")
    expect(choice.host_states, "there are no ranks")
    expect(all(0 <= part <= 1 for part in choice.host_states), f"fractions of the state are {choice.host_states}")
    expect(policy.choose() == choice, "the same question has two answers")
