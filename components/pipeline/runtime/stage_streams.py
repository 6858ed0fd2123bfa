"""
CUDA streams for a rank's stages, to run two stages' forward and backward passes at the same time.

One pass's communication, such as token dispatch to experts, is then hidden behind the other's products (DeepSeek-AI
2024, DeepSeek-V3, arXiv 2412.19437, section 3.2.1). A stage's work stays in order. A stream waits for another only if
its stage consumes the other stage's result.
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
"""Offset of the stage whose result a pass consumes."""


@attrs.frozen(eq=False)
class StageStreams:
    """Streams for this rank's stages by number; stages that share parameters share one stream."""

    streams: Mapping[int, Any]
    _events: dict[tuple[str, int, int], Any] = attrs.field(init=False, factory=dict)

    @classmethod
    def create(cls, stages: Sequence[Stage], create_stream: Callable[[], Any]) -> "StageStreams":
        """Create the streams with `create_stream`, such as `torch.cuda.Stream`."""
        parameters = [parameter for stage in stages for parameter in set(stage.module.parameters())]
        if len(set(parameters)) < len(parameters):  # two streams would add to one gradient at the same time
            stream = create_stream()
            return cls({stage.index: stream for stage in stages})
        return cls({stage.index: create_stream() for stage in stages})

    def wait_for_current_stream(self) -> None:
        """Let all streams wait for the current stream."""
        for stream in self._distinct_streams():
            stream.wait_stream(torch.cuda.current_stream(stream.device))

    def make_current_stream_wait(self) -> None:
        """Let the current stream wait for all streams."""
        for stream in self._distinct_streams():
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def run_in_stream(
        self, operation: Operation, local_inputs: Callable[[Action], Iterable[Tensor]], action: Action
    ) -> None:
        """Run an action in its stage's stream; `local_inputs` returns its inputs from another local stage."""
        stream = self.streams[action.stage]
        other = action.stage + NEIGHBOUR.get(action.op, 0)
        with torch.cuda.stream(stream):
            if event := self._events.pop((_get_direction(action), other, action.microbatch), None):
                stream.wait_event(event)
                for tensor in local_inputs(action):
                    # The allocator must not reuse its memory before this stream has read it.
                    tensor.record_stream(stream)
            operation(action)
            if action.stage - NEIGHBOUR.get(action.op, 0) in self.streams and action.op in NEIGHBOUR:
                self._events[_get_direction(action), action.stage, action.microbatch] = stream.record_event()

    def _distinct_streams(self) -> set[Any]:
        return set(self.streams.values())


def _get_direction(action: Action) -> str:
    """Return F for forward passes, and B for backward passes."""
    return "F" if action.op == "F" else "B"
