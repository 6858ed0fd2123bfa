"""Memory by kind at a run's start, and an out-of-memory message with remedies."""

import logging
import re
from collections.abc import Iterator
from typing import ClassVar

import attrs
import torch

from drawloom import Every, UserError, component
from drawloom.components.storage.byte_size import format_decimal_byte_size
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
    chooses_recompute,
    sum_memory_by_kind,
)

log = logging.getLogger("drawloom.run")

# torch's messages when an allocation fails, on a GPU and on the CPU
ALLOCATION = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")
CPU_MESSAGE = "can't allocate memory"


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
        sizes = sum_memory_by_kind(self.users.values())
        parts = [f"{readable_memory_kind(kind)} {format_decimal_byte_size(size)}" for kind, size in sizes.items()]
        return "  ".join([f"memory  {format_decimal_byte_size(sum(sizes.values()))}", *parts])

    def on_event(self, event: Event) -> None:
        """Log one line when the run starts."""
        if event.kind == "run_started":
            log.info("%s", self.preview())

    def on_failure(self, error: BaseException) -> BaseException | None:
        """Return a UserError in place of a failed allocation's error."""
        if not is_out_of_memory(error):
            return None
        peak = self.device.get_peak_memory_so_far()
        sizes = {
            readable_memory_kind(kind): size for kind, size in sum_memory_by_kind(self.users.values(), peak).items()
        }
        table = [
            f"  {kind:25}  {format_decimal_byte_size(size):>12}"
            for kind, size in [*sizes.items(), ("peak so far", peak)]
        ]
        remedies = [f"  {remedy}" for remedy in self._list_memory_saving_settings()]
        allocation = _describe_failed_allocation(error)
        lines = [f"{self.device.device} is out of memory: {allocation}", *table, "what would help:", *remedies]
        return UserError("\n".join(lines))

    def _list_memory_saving_settings(self) -> Iterator[str]:
        """Yield settings that reduce memory, with their present values."""
        for node, batching in self.batching.items():
            if batching.micro_size > 1:
                yield f"{node}.micro_size = {batching.micro_size}: with fewer rows, activations take less"
        for node, rows in self.data.items():
            yield f"rows of {rows.length:,} tokens in [{node}]: with shorter ones, activations take less"
        planned = [node for node, schedule in self.schedules.items() if chooses_recompute(schedule)]
        for node in planned:
            yield f"{node}.memory: with less, stages keep fewer activations, and compute more of them again"
        for node, stages in self.stages.items():
            if not planned and any(stage.recompute == "none" for stage in stages.local):
                yield f'{node}.recompute = "none": with "selective" or "blocks", fewer activations are kept'
        for node, precision in self.precision.items():
            if precision.compute.itemsize > 2:
                yield f'{node}.compute = "{_dtype_name(precision.compute)}": with "bfloat16", activations take half'
            elif precision.parameter.itemsize > 2:
                yield (
                    f'{node}.parameter = "{_dtype_name(precision.parameter)}": with "bfloat16" and '
                    "optim.stochastic_adamw, there are no masters, and the optimizer state takes half"
                )
        for node, mesh in self.mesh.items():
            shards = mesh.sizes.data_shard
            yield f"{node}.data_shard = {shards}: with more ranks, each holds less of parameters, gradients and moments"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception is a failed allocation on the device or the host."""
    # torch raises a plain RuntimeError if the CPU's allocator fails
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and CPU_MESSAGE in str(error)
    )


def readable_memory_kind(kind: str) -> str:
    """Return the words for a kind of memory."""
    return "activations and workspace" if kind == "workspace" else kind.replace("_", " ")


def _describe_failed_allocation(error: BaseException) -> str:
    """Return the failed allocation's size, and the pipeline's note on where it failed, if there is one."""
    match = ALLOCATION.search(str(error))
    text = "an allocation failed" if match is None else f"{_format_allocation_size(match[1])} could not be allocated"
    return " ".join([text, *getattr(error, "__notes__", ())])


def _format_allocation_size(amount: str) -> str:
    """Return an amount such as "1024 bytes" in readable units."""
    number, unit = amount.split()
    return format_decimal_byte_size(int(number)) if unit == "bytes" else amount


def _dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")
