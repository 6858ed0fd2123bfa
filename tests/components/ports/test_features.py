"""Memory by kind."""

from collections.abc import Mapping

import attrs

from drawloom.components.ports.features import MemoryKind, sum_memory_by_kind


@attrs.frozen
class User:
    """A user of this many bytes."""

    held: Mapping[MemoryKind, int]

    def device_bytes(self) -> Mapping[MemoryKind, int]:
        return self.held


def test_kinds_of_several_users_are_added_and_the_rest_of_a_peak_is_workspace() -> None:
    """Kinds without bytes are left out; a peak below the known bytes leaves no workspace."""
    users = [User({"masters": 40, "gradients": 0}), User({"masters": 2, "optimizer_state": 10})]
    assert sum_memory_by_kind(users) == {"masters": 42, "optimizer_state": 10}
    assert sum_memory_by_kind(users, peak=60) == {"masters": 42, "optimizer_state": 10, "workspace": 8}
    assert sum_memory_by_kind(users, peak=50) == {"masters": 42, "optimizer_state": 10}
