"""Memory by kind at a run's start, and in an out-of-memory message."""

from typing import ClassVar

import attrs

from drawloom import Every, UserError, component
from drawloom.ports import (
    Batching,
    Device,
    Event,
    EventKind,
    MemoryUser,
    Mesh,
    PackedDataset,
    Precision,
    Schedule,
    Stages,
    run_log,
    sum_memory_by_kind,
)


@component(impact="safe")
class MemoryReport:
    """
    Report about this rank's memory for parameters, gradients and optimizer state, logged at the run's start.

    If memory runs out, also while the run opens, the run ends with a message instead of a traceback. It shows the
    failed allocation, the memory by kind, and the helpful settings, with their present values.
    """

    observes: ClassVar[tuple[EventKind, ...]] = ("run_started",)

    device: Device
    users: Every[MemoryUser]
    batching: Every[Batching]
    precision: Every[Precision]
    mesh: Every[Mesh]
    stages: Every[Stages]
    data: Every[PackedDataset] = attrs.field(factory=Every)
    schedules: Every[Schedule] = attrs.field(factory=Every)

    def preview(self) -> str:
        """Return one line with the total first, then every kind."""
        from drawloom.components.storage.byte_size import format_decimal_byte_size

        sizes = self._list_sizes()
        parts = [f"{kind} {format_decimal_byte_size(size)}" for kind, size in sizes.items()]
        return "  ".join([f"memory  {format_decimal_byte_size(sum(sizes.values()))}", *parts])

    def on_event(self, event: Event) -> None:
        """Log one line when the run starts."""
        if event.kind == "run_started":
            run_log.info("%s", self.preview())

    def on_failure(self, error: BaseException) -> BaseException | None:
        """Return a UserError in place of a failed allocation's error."""
        from drawloom.components.listeners.out_of_memory import describe_out_of_memory, is_out_of_memory

        if not is_out_of_memory(error):
            return None
        peak = self.device.get_peak_memory_so_far()
        return UserError(describe_out_of_memory(error, {**self._list_sizes(peak), "peak so far": peak}, self))

    def _list_sizes(self, peak: int | None = None) -> dict[str, int]:
        """Return bytes by kind in words, with the activations if the peak is known."""
        sizes = sum_memory_by_kind(self.users.values(), peak)
        return {
            "activations and workspace" if kind == "workspace" else kind.replace("_", " "): size
            for kind, size in sizes.items()
        }
