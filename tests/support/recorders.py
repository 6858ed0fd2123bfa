"""Stand-ins for CUDA graphs on a CPU: a recorded function is computed again at every launch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock
from weakref import WeakSet

import attrs
import torch
from torch import Tensor

from drawloom.components.parallel.fsdp import ShardedModule
from drawloom.components.parallel.shard_unit import ShardUnit
from drawloom.components.pipeline.captured import CapturedPasses, MicrobatchGraphs
from drawloom.components.state.trees import list_leaves
from support.host_reads import NoHostReads


@attrs.define(eq=False)
class ShardMemory:
    """What graphs see of units of shards: a replay neither reads nor changes the state that Python code sees."""

    contents: dict[ShardUnit, Tensor] = attrs.field(factory=dict)  # of gathered units, as the last graph left them
    units: dict[ShardUnit, None] = attrs.field(factory=dict)

    def take_states(self) -> dict[ShardUnit, tuple[str, Tensor | None]]:
        """Return the units' states, and copies of gathered memory."""
        return {
            unit: (unit.state, _bytes_of(unit).clone() if unit.state == "gathered" else None) for unit in self.units
        }

    def set_states(self, states: Mapping[ShardUnit, tuple[str, Tensor | None]]) -> None:
        """Give the units states and memory; without contents their values are NaN."""
        for unit, (state, content) in states.items():
            unit.free()
            if state == "gathered":
                unit._storage.resize_(unit._bytes)
                memory = _bytes_of(unit)
                memory.fill_(255) if content is None else memory.copy_(content)
                unit.state = "gathered"
                for parameter in unit.parameters:
                    parameter.set_in_modules(parameter.unsharded)

    def forget_values(self, before: Mapping[ShardUnit, tuple[str, Tensor | None]]) -> None:
        """After a recording, which computes nothing on a GPU, set what it has gathered to NaN."""
        for unit in self.units:
            if unit.state == "gathered" and before[unit][0] != "gathered":
                _bytes_of(unit).fill_(255)


def _bytes_of(unit: ShardUnit) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(unit._storage)


@attrs.define(eq=False)
class Again:
    """A function's stand-in graph: computes again, and overwrites the first results."""

    run: Callable[[], Any]
    outputs: Any
    memory: ShardMemory
    before: Mapping[ShardUnit, tuple[str, Tensor | None]]

    def replay(self) -> None:
        """Run the recorded function, as a GPU does only here, and write its results."""
        outside = self.memory.take_states()
        contents = self.memory.contents
        self.memory.set_states({unit: (state, contents.get(unit)) for unit, (state, _) in self.before.items()})
        for there, here in zip(list_leaves(self.outputs), list_leaves(self.run()), strict=True):
            if isinstance(there, Tensor):
                there.data.copy_(here)
        contents.update({unit: values for unit, (_, values) in self.memory.take_states().items() if values is not None})
        self.memory.set_states(outside)


class Recorder:
    """Counter of slots and recordings; a recorded function reads no value of a tensor, unless `may_read`."""

    def __init__(self, may_read: bool) -> None:
        self.slots = self.recorded = self.running = 0
        self.may_read, self.memory = may_read, ShardMemory()
        self.living: WeakSet[Again] = WeakSet()

    def new(self) -> Callable[[Callable[[], Any]], Again]:
        """Return a recorder for a slot."""
        self.slots += 1
        return self.record

    def record(self, run: Callable[[], Any]) -> Again:
        """Return a recorded function."""
        self.recorded += 1
        before = self.memory.take_states()
        with nullcontext() if self.may_read else NoHostReads():
            outputs = run()
        self.memory.forget_values(before)
        recorded = Again(run, outputs, self.memory, before)
        self.living.add(recorded)
        return recorded


@contextmanager
def use_recorder(may_read: bool = True) -> Iterator[Recorder]:
    """Replace CUDA graphs in every run. Eager kernels for experts read values that kernels for GPUs do not."""
    recorder = Recorder(may_read)
    record_pass = MicrobatchGraphs.record_pass

    def record_with_units(graphs: MicrobatchGraphs, operation: str) -> None:
        if isinstance(shards := graphs.runner.stage.shards, ShardedModule):
            recorder.memory.units |= dict.fromkeys(unit for unit in shards.units if unit.parameters)
        record_pass(graphs, operation)
        if isinstance(shards, ShardedModule) and shards.gathers_per_block:
            # A later graph would read them where this one has gathered them, and other graphs may run in between.
            assert {unit.state for block in shards.blocks for unit in block} <= {"freed"}

    with (
        mock.patch.object(CapturedPasses, "_new_record", recorder.new),
        mock.patch.object(MicrobatchGraphs, "record_pass", record_with_units),
    ):
        yield recorder
