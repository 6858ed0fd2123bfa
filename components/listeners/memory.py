"""Memory by kind at the start of a run, and a message with remedies where there is not enough of it."""

import logging
import re
from collections.abc import Iterator
from typing import ClassVar

import attrs
import torch

from drawloom.components.ports.data import PackedDataset
from drawloom.components.ports.distributed import Device, Mesh, Precision
from drawloom.components.ports.memory import MemoryUser, memory_by_kind
from drawloom.components.ports.pipeline import Schedule, chooses_recompute
from drawloom.components.ports.run import Batching, Event, EventKind
from drawloom.components.ports.stages import Stages
from drawloom.components.storage.byte_size import byte_size
from drawloom.graph import Every, UserError, component

log = logging.getLogger("drawloom.run")

# torch's message of a CUDA allocation, and that of an allocation on the CPU
WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")
ON_CPU = "can't allocate memory"


@component(impact="safe")
class MemoryReport:
    """
    Logs at the start how much memory this rank's parameters, gradients and optimizer state take.

    When memory runs out, also while the run opens, the run ends with a message instead of a traceback: what was being
    allocated, memory by kind, and the settings that would help with their present values.
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
        """One line with the sum first, then each kind."""
        held = memory_by_kind(self.users.values())
        parts = [f"{name(kind)} {byte_size(size)}" for kind, size in held.items()]
        return "  ".join([f"memory  {byte_size(sum(held.values()))}", *parts])

    def on_event(self, event: Event) -> None:
        """Log one line when the run starts."""
        if event.kind == "run_started":
            log.info("%s", self.preview())

    def on_failure(self, error: BaseException) -> BaseException | None:
        """A UserError in place of an error of allocation."""
        if not is_out_of_memory(error):
            return None
        peak = self.device.memory()
        sizes = {name(kind): size for kind, size in memory_by_kind(self.users.values(), peak).items()}
        table = [f"  {kind:25}  {byte_size(size):>12}" for kind, size in [*sizes.items(), ("peak so far", peak)]]
        remedies = [f"  {remedy}" for remedy in self._remedies()]
        lines = [f"{self.device.device} is out of memory: {_wanted(error)}", *table, "what would help:", *remedies]
        return UserError("\n".join(lines))

    def _remedies(self) -> Iterator[str]:
        for node, batching in self.batching.items():
            if batching.micro_size > 1:
                yield f"{node}.micro_size = {batching.micro_size}: with fewer rows, activations take less"
        for node, rows in self.data.items():
            yield f"rows of {rows.length:,} tokens in [{node}]: with shorter ones, activations take less"
        choosing = [node for node, schedule in self.schedules.items() if chooses_recompute(schedule)]
        for node in choosing:
            yield f"{node}.memory: with less, stages keep fewer activations, and compute more of them again"
        for node, stages in self.stages.items():
            if not choosing and any(stage.recompute == "none" for stage in stages.local):
                yield f'{node}.recompute = "none": with "selective" or "blocks", fewer activations are kept'
        for node, precision in self.precision.items():
            if precision.compute.itemsize > 2:
                yield f'{node}.compute = "{_dtype(precision.compute)}": with "bfloat16", activations take half'
            elif precision.parameter.itemsize > 2:
                yield (
                    f'{node}.parameter = "{_dtype(precision.parameter)}": with "bfloat16" and '
                    "optim.stochastic_adamw, there are no masters, and the optimizer state takes half"
                )
        for node, mesh in self.mesh.items():
            shards = mesh.sizes.data_shard
            yield f"{node}.data_shard = {shards}: with more ranks, each holds less of parameters, gradients and moments"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception is that of an allocation on the device or on the host."""
    # torch raises a plain RuntimeError where the CPU's allocator fails.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and ON_CPU in str(error)
    )


def name(kind: str) -> str:
    """A kind of memory in words."""
    return "activations and workspace" if kind == "workspace" else kind.replace("_", " ")


def _wanted(error: BaseException) -> str:
    """What could not be allocated, and where if a note of the pipeline says so."""
    found = WANTED.search(str(error))
    size = "an allocation failed" if found is None else f"{_readable(found[1])} could not be allocated"
    return " ".join([size, *getattr(error, "__notes__", ())])


def _readable(amount: str) -> str:
    number, unit = amount.split()
    return byte_size(int(number)) if unit == "bytes" else amount


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
