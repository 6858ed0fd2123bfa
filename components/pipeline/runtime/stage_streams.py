"""
A CUDA stream for each stage of a rank, so that a forward and a backward pass of two stages run at the same time.

What one pass waits for, such as tokens that travel to their experts, is then hidden behind the other's products
(DeepSeek-AI 2024, DeepSeek-V3, arXiv 2412.19437, section 3.2.1). A stage's own work stays in order; streams wait for
one another only where a stage takes what another stage of this rank has made.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.components.ports.program import Action
from drawloom.components.ports.stages import Stage

Operation = Callable[[Action], None]

NEIGHBOUR = {"F": -1, "B": 1, "I": 1}
"""Where the stage is, from here, whose result a pass takes."""


@attrs.frozen(eq=False)
class StageStreams:
    """The stream of each stage of this rank, by its number; of stages that share parameters, all have one."""

    streams: Mapping[int, Any]
    _made: dict[tuple[str, int, int], Any] = attrs.field(init=False, factory=dict)

    @classmethod
    def of(cls, stages: Sequence[Stage], new: Callable[[], Any]) -> "StageStreams":
        """Streams that `new` makes, such as `torch.cuda.Stream`."""
        held = [parameter for stage in stages for parameter in set(stage.module.parameters())]
        if len(set(held)) < len(held):  # their gradients are sums, which two streams would write at once
            one = new()
            return cls({stage.index: one for stage in stages})
        return cls({stage.index: new() for stage in stages})

    def begin(self) -> None:
        """Have all streams wait for what the current one has been given."""
        for stream in self._each():
            stream.wait_stream(torch.cuda.current_stream(stream.device))

    def end(self) -> None:
        """Have the current stream wait for all that stages were given."""
        for stream in self._each():
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def run(self, operation: Operation, handed: Callable[[Action], Iterable[Tensor]], action: Action) -> None:
        """
        Carry out an action in its stage's stream; `handed` gives the tensors that another stage of this rank has left.
        """
        stream = self.streams[action.stage]
        other = action.stage + NEIGHBOUR.get(action.op, 0)
        with torch.cuda.stream(stream):
            if made := self._made.pop((_pass(action), other, action.microbatch), None):
                stream.wait_event(made)
                for tensor in handed(action):
                    # Its memory is not used again before this stream is done with it.
                    tensor.record_stream(stream)
            operation(action)
            if action.stage - NEIGHBOUR.get(action.op, 0) in self.streams and action.op in NEIGHBOUR:
                self._made[_pass(action), action.stage, action.microbatch] = stream.record_event()

    def _each(self) -> set[Any]:
        return set(self.streams.values())


def _pass(action: Action) -> str:
    return "F" if action.op == "F" else "B"
