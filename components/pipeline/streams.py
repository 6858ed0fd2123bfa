"""
CUDA streams for a rank's stages, to run two stages' forward and backward passes at the same time.

One pass's communication, such as token dispatch to experts, is then hidden behind the other's products (DeepSeek-AI
2024, DeepSeek-V3, arXiv 2412.19437, section 3.2.1). A stage's work stays in order. A stream waits for another only if
its stage consumes the other stage's result.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from drawloom.components.ports.distributed import Device
from drawloom.components.ports.passes import Operation, PassFeature, PassRun
from drawloom.components.ports.program import Action
from drawloom.components.ports.stages import Stage
from drawloom.graph import Problem, component
from drawloom.graph.wiring.node import NodeView

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


@component(impact="safe")
class ConcurrentStages(PassFeature):
    """CUDA stream for every stage, to run overlapping passes of a schedule concurrently; GPU only."""

    excludes: ClassVar[Mapping[str, str]] = {
        "pipeline.offloaded": "offloaded activations would be freed on another stream than they were allocated on",
    }

    device: Device
    _streams: StageStreams | None = attrs.field(init=False, default=None)

    @classmethod
    def check_passes(cls, feature: NodeView, executor: NodeView) -> Iterator[Problem]:
        """Yield problems for streams with copies of weights or activations, or on the CPU."""
        remove = f"or remove [{feature.name}]"
        stages, schedule, device = map(executor.neighbour, ("stages", "schedule", "device"))
        if stages and stages.settings.get("stream_frozen"):
            text = "a frozen weight would be copied on another stream than the one that uses it"
            yield stages.problem("stream_frozen", text, f"write stream_frozen = false, {remove}")
        if schedule and schedule.settings.get("offload"):
            yield schedule.problem("offload", cls.excludes["pipeline.offloaded"], f"remove it, {remove}")
        if device and device.settings.get("kind") == "cpu":
            text = "the device is the CPU, which has no streams"
            yield feature.problem("use", text, f"remove [{feature.name}]")

    def start_run(self, run: PassRun, operations: Mapping[str, Operation]) -> Mapping[str, Operation]:
        """Return operations that run in the stream of their stage."""
        if run.kind != "training" or self.device.device.type != "cuda":
            return operations
        if self._streams is None:
            stages = [runnable.stage for runnable in run.stages.values()]
            self._streams = StageStreams.create(stages, partial(torch.cuda.Stream, self.device.device))
        run_in_stream = self._streams.run_in_stream
        self._streams.wait_for_current_stream()
        return {
            op: partial(run_in_stream, operation, run.list_inputs_from_local_stage)
            for op, operation in operations.items()
        }

    def end_run(self, run: PassRun) -> None:
        if run.kind == "training" and self._streams is not None:
            self._streams.make_current_stream_wait()
