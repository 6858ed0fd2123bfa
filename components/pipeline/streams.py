"""
CUDA streams for a rank's stages, to run two stages' forward and backward passes at the same time.

One pass's communication, such as token dispatch to experts, is then hidden behind the other's products (DeepSeek-AI
2024, DeepSeek-V3, arXiv 2412.19437, section 3.2.1). A stage's work stays in order. A stream waits for another only if
its stage consumes the other stage's result.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from drawloom import NodeView, Problem, component, internal
from drawloom.ports import Action, Device, Operation, PassFeature, PassRun, RunnableStage

NEIGHBOUR = {"F": -1, "B": 1, "I": 1}
"""Offset of the stage whose result a pass consumes."""


@component(impact="safe")
class ConcurrentStages(PassFeature):
    """CUDA stream for every stage, to run overlapping passes of a schedule concurrently; GPU only."""

    excludes: ClassVar[Mapping[str, str]] = {
        "pipeline.offloaded": "offloaded activations would be freed on another stream than they were allocated on"
    }

    device: Device
    # by stage; stages that share parameters share one stream
    _streams: dict[int, Any] = internal(factory=dict)
    _events: dict[tuple[str, int, int], Any] = internal(factory=dict)

    @classmethod
    def check_passes(cls, feature: NodeView, executor: NodeView) -> Iterator[Problem]:
        """Yield problems if activations are copied, or the device is the CPU."""
        schedule, device = map(executor.neighbour, ("schedule", "device"))
        if schedule and schedule.settings.get("offload"):
            yield schedule.problem(
                "offload", cls.excludes["pipeline.offloaded"], f"remove it, or remove [{feature.name}]"
            )
        if device and device.settings.get("kind") == "cpu":
            yield feature.problem("use", "the device is the CPU, which has no streams", f"remove [{feature.name}]")

    def start_run(self, run: PassRun, operations: Mapping[str, Operation]) -> Mapping[str, Operation]:
        """Return a training step's operations, each in its stage's stream."""
        if run.kind != "training" or self.device.device.type != "cuda":
            return operations
        if not self._streams:
            self._streams = create_streams(run.stages, partial(torch.cuda.Stream, self.device.device))
        for stream in {*self._streams.values()}:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        return {
            op: partial(self._run_in_stream, operation, run.list_inputs_from_local_stage)
            for op, operation in operations.items()
        }

    def end_run(self, run: PassRun) -> None:
        if run.kind == "training":
            for stream in {*self._streams.values()}:
                torch.cuda.current_stream(stream.device).wait_stream(stream)

    def _run_in_stream(
        self, operation: Operation, local_inputs: Callable[[Action], Iterable[Tensor]], action: Action
    ) -> None:
        """Run an action in its stage's stream; `local_inputs` returns its inputs from another local stage."""
        stream = self._streams[action.stage]
        other = action.stage + NEIGHBOUR.get(action.op, 0)
        with torch.cuda.stream(stream):
            if event := self._events.pop((_get_direction(action), other, action.microbatch), None):
                stream.wait_event(event)
                for tensor in local_inputs(action):
                    # The allocator must not reuse its memory before this stream has read it.
                    tensor.record_stream(stream)
            operation(action)
            if action.stage - NEIGHBOUR.get(action.op, 0) in self._streams and action.op in NEIGHBOUR:
                self._events[_get_direction(action), action.stage, action.microbatch] = stream.record_event()


def create_streams(stages: Mapping[int, RunnableStage], create: Callable[[], Any]) -> dict[int, Any]:
    """Return a stream by stage; only one if two stages share parameters, whose gradient two streams would add to."""
    parameters = [parameter for part in stages.values() for parameter in {*part.stage.module.parameters()}]
    if len({*parameters}) < len(parameters):
        return dict.fromkeys(stages, create())
    return {index: create() for index in stages}


def _get_direction(action: Action) -> str:
    """Return F for forward passes, and B for backward passes."""
    return "F" if action.op == "F" else "B"
