"""torch.profiler traces for some steps, with ranges for steps, phases, pipeline actions and layers."""

import gzip
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, schedule

from drawloom import Every, at_least, component, internal, setting
from drawloom.components.storage.durable_files import create_folder_unless_link
from drawloom.ports import Device, Event, Mesh, RunFolder, Stages, Step, run_log

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)$")
RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
MEMORY_EVENTS = 200_000
"""Largest number of allocations in a snapshot, which include their stacks: about 1 MB per 1000 allocations."""


@component(impact="safe")
class Profiler:
    """
    Profiler: writes `traces/steps-A-B-rank-R.json.gz` in the run folder, for ui.perfetto.dev or chrome://tracing.

    The process's steps form cycles: `wait` steps run without the profiler, `warmup` steps are profiled and
    discarded because the first profiled steps are slower, and `active` steps are traced into one file. With `memory`
    the trace also contains allocations and an allocated memory graph, and on a GPU the profiler also writes
    `traces/steps-A-B-rank-R.pickle` for docs.pytorch.org/memory_viz.

    If the profiler fails, it is turned off with a warning.
    """

    folder: RunFolder
    mesh: Mesh
    device: Device
    stages: Every[Stages]
    wait: int = setting("steps without the profiler at a cycle's start", default=3, check=at_least(0))
    warmup: int = setting("profiled and discarded steps", default=1, check=at_least(1))
    active: int = setting("steps in one trace", default=2, check=at_least(1))
    repeat: int = setting("traces per process; 0: traces until the end", default=1, check=at_least(0))
    memory: bool = setting("trace allocations, which makes steps slower", default=False)

    _running: profile | None = internal(None)
    _first: int = internal(0)
    _step: int = internal(0)
    _written: int = internal(0)
    _off: bool = internal(False)
    _ranges: list[Any] = internal(factory=list)
    _hooks: list[Any] = internal(factory=list)
    _failure: Exception | None = internal(None)

    def close(self) -> None:
        """Discard an unfinished trace."""
        self._off = True
        self._stop_profiler_and_remove_hooks()

    def on_event(self, event: Event) -> None:
        """Begin or end a range, and advance the profiler at a step's end."""
        if self._off or event.step is None:
            return
        try:
            self._begin_or_end_range_for(event, event.step)
        except Exception as error:
            self._off = True
            self._stop_profiler_and_remove_hooks()
            run_log.warning("no more traces: the profiler failed at step %d: %s", event.step.index, error)

    def _begin_or_end_range_for(self, event: Event, step: Step) -> None:
        """Begin or end the trace's range for the step or phase that an event is about."""
        if event.kind == "step_started":
            self._start_profiler_and_step_range(step)
        elif event.kind == "phase_started" and self._is_step_traced:
            self._begin_named_range(event.phase)
        elif event.kind == "phase_ended" and self._is_step_traced:
            self._end_innermost_range()
        elif event.kind == "step_ended" and self._running is not None:
            self._end_step_range_and_advance(self._running)

    @property
    def _is_step_traced(self) -> bool:
        """Whether the current step is traced."""
        return self._running is not None and self._running.current_action in RECORDING

    def _start_profiler_and_step_range(self, step: Step) -> None:
        """Start the profiler if necessary; in a traced step also observe the layers and begin the step's range."""
        if self._running is None:
            self._start_profiler()
        self._step = step.index
        if self._is_step_traced:
            if not self._hooks:
                self._first = step.index
                self._hooks = [*self._add_layer_range_hooks()]
            self._begin_named_range(f"step {step.index}")

    def _end_step_range_and_advance(self, running: profile) -> None:
        """End the step's range, and let the profiler advance, which writes the trace after the last step."""
        if self._is_step_traced:
            self._end_innermost_range()
        running.step()  # writes the trace if it is complete
        if self._failure is not None:
            raise self._failure
        if not self._is_step_traced:
            self._remove_hooks()
        if self.repeat and self._written == self.repeat:
            self._off = True
            self._stop_profiler_and_remove_hooks()

    def _start_profiler(self) -> None:
        """Create and start torch's profiler, and record GPU allocations if `memory` is set."""
        gpu = self.device.device.type == "cuda"
        if self.memory and gpu:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        self._running = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])],
            schedule=schedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=self.repeat),
            on_trace_ready=self._write_trace_or_keep_error,
            profile_memory=self.memory,
            # without acc_events, torch 2.11 warns that it drops the events of earlier cycles
            acc_events=True,
        )
        self._running.start()

    def _stop_profiler_and_remove_hooks(self) -> None:
        """Stop torch's profiler, and remove hooks and open ranges."""
        running, self._running = self._running, None
        self._remove_hooks()
        while self._ranges:
            self._end_innermost_range()
        if running is not None:
            running.stop()
            if self.memory and self.device.device.type == "cuda":
                torch.cuda.memory._record_memory_history(enabled=None)

    def _begin_named_range(self, name: str) -> None:
        """Begin a named range in the trace."""
        self._ranges.append(record_function(name))
        self._ranges[-1].__enter__()

    def _end_innermost_range(self) -> None:
        """End the innermost range."""
        if self._ranges:
            self._ranges.pop().__exit__(None, None, None)

    def _add_layer_range_hooks(self) -> Iterator[Any]:
        """Add hooks with a range for every layer; yield their handles."""
        for stages in self.stages.values():
            for stage in stages.local:
                for name, module in stage.module.named_modules():
                    if match := LAYER.search(name):
                        yield from self._add_range_hooks(module, f"layer {match[1]}")

    def _add_range_hooks(self, module: nn.Module, name: str) -> Iterator[Any]:
        """Add hooks with a range for a module's forward pass; yield their handles."""

        def enter(_module: nn.Module, _inputs: Any) -> None:
            self._begin_named_range(name)

        def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
            self._end_innermost_range()

        yield module.register_forward_pre_hook(enter)
        yield module.register_forward_hook(leave)

    def _remove_hooks(self) -> None:
        """Remove the layers' hooks."""
        while self._hooks:
            self._hooks.pop().remove()

    def _write_trace_or_keep_error(self, finished_profile: profile) -> None:
        """Write a complete trace; keep an error for the step's end."""
        if self._off:
            return  # an unfinished trace
        # An error that passes through torch 2.13's profiler makes the profiler kill the process when it stops.
        try:
            self._write_trace_and_memory_files(finished_profile)
        except Exception as error:
            self._failure = error

    def _write_trace_and_memory_files(self, finished_profile: profile) -> None:
        """Write the trace, and with `memory` its counters and the allocation snapshot."""
        self._written += 1
        name = f"steps-{self._first}-{self._step}-rank-{self.mesh.world.rank}"
        path = create_folder_unless_link(self.folder.folder / "traces") / f"{name}.json.gz"
        path.unlink(missing_ok=True)  # torch would follow a link
        finished_profile.export_chrome_trace(str(path))
        if self.memory:
            add_memory_counters_to_trace(path)
            if self.device.device.type == "cuda":
                snapshot = path.with_name(f"{name}.pickle")
                snapshot.unlink(missing_ok=True)
                torch.cuda.memory._dump_snapshot(str(snapshot))  # type: ignore[no-untyped-call]


def add_memory_counters_to_trace(path: Path) -> None:
    """Add memory graphs by device, for Perfetto, to a trace; torch writes only allocations."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        trace: dict[str, Any] = json.load(file)
    trace["traceEvents"] += [
        _make_memory_counter_event(event) for event in trace["traceEvents"] if event.get("name") == "[memory]"
    ]
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(trace, file)


def _make_memory_counter_event(event: Mapping[str, Any]) -> dict[str, Any]:
    """Turn a torch memory event into a counter event for Perfetto."""
    values = event["args"]
    device = "CPU" if values["Device Id"] < 0 else f"GPU {values['Device Id']}"
    args = {key: values[key] for key in ("Total Allocated", "Total Reserved") if key in values}
    return {"ph": "C", "name": f"memory of the {device}", "pid": event["pid"], "ts": event["ts"], "args": args}
