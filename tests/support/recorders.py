"""Stand-ins for CUDA graphs on a CPU: a recorded function is computed again at every launch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import attrs
from torch import Tensor

from drawloom.components.pipeline.captured import CapturedPasses
from drawloom.components.state.trees import list_leaves
from support.host_reads import NoHostReads


@attrs.define
class Again:
    """A function's stand-in graph: computes again, and overwrites the first results."""

    run: Callable[[], Any]
    outputs: Any

    def replay(self) -> None:
        """Run the recorded function, as a GPU does only here, and write its results."""
        for there, here in zip(list_leaves(self.outputs), list_leaves(self.run()), strict=True):
            if isinstance(there, Tensor):
                there.data.copy_(here)


class Recorder:
    """Counter of slots and recordings; a recorded function reads no value of a tensor, unless `may_read`."""

    def __init__(self, may_read: bool) -> None:
        self.slots = self.recorded = self.running = 0
        self.may_read = may_read

    def new(self) -> Callable[[Callable[[], Any]], Again]:
        """Return a recorder for a slot."""
        self.slots += 1
        return self.record

    def record(self, run: Callable[[], Any]) -> Again:
        """Return a recorded function."""
        self.recorded += 1
        if not self.may_read:
            with NoHostReads():
                return Again(run, run())
        return Again(run, run())


@contextmanager
def use_recorder(may_read: bool = True) -> Iterator[Recorder]:
    """Replace CUDA graphs in every run. Eager kernels for experts read values that kernels for GPUs do not."""
    recorder = Recorder(may_read)
    with mock.patch.object(CapturedPasses, "_new_record", recorder.new):
        yield recorder
