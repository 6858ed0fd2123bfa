"""Timeline of a step in a profiler trace: every pipeline action's start and end."""

import gzip
import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import numpy as np

from drawloom import UserError
from drawloom.components.pipeline.program.cost_table import CostTable
from drawloom.components.pipeline.program.lowering import merge_split_backwards
from drawloom.components.pipeline.program.timing import Costs, Floats, index_produced_and_consumed_results
from drawloom.components.pipeline.runtime.p2p import WAIT
from drawloom.components.pipeline.simulation.simulator import Simulation
from drawloom.components.storage.regular_file import open_regular_file
from drawloom.ports import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, OPS, Program

ACTION = re.compile(r"\d+[FBIW]\d+")
FILE = re.compile(r"steps-(\d+)-(\d+)-rank-(\d+)\.json\.gz")
STEP = re.compile(r"step \d+")
Span = tuple[float, float]
"""Start and end, in seconds."""


@attrs.frozen(eq=False)
class TracedStep:
    """Traced step: the program, and its actions' start and end in seconds, both of shape (actions,)."""

    program: Program
    start: Floats
    end: Floats

    @property
    def simulation(self) -> Simulation:
        """Return the step as a simulation, for drawings and summaries."""
        return Simulation(self.program, Costs(), "free", self.start, self.end)

    def compute_cost_table(self) -> CostTable:
        """
        Return the median seconds of every stage's ops, and the minimum seconds between a result and its use.

        If a stage's backward passes were not split, their time counts half as I and half as W.
        """
        lengths = np.full((self.program.stages, len(OPS)), np.nan)
        for stage, op in {*zip(self.program.stage.tolist(), self.program.op.tolist(), strict=True)}:
            chosen = (self.program.stage == stage) & (self.program.op == op)
            lengths[stage, op] = np.median((self.end - self.start)[chosen])
        whole, inputs, weights = (lengths[:, op] for op in (BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT))
        whole[:] = np.where(np.isnan(whole), inputs + weights, whole)
        for part in (inputs, weights):
            part[:] = np.where(np.isnan(part), whole / 2, part)
        return CostTable(comm=self._min_message_seconds(), lengths=lengths)

    def _min_message_seconds(self) -> float:
        """Return the minimum seconds between a result and its use on another rank; 0 without messages."""
        produces, consumes, delay = index_produced_and_consumed_results(self.program, Costs(comm=1.0))
        ready = np.zeros(int(produces.max(initial=0)) + 1)
        ready[produces] = self.end
        between = self.start - ready[consumes]
        return max(0.0, float(between[delay > 0].min(initial=np.inf))) if (delay > 0).any() else 0.0


def read_traced_step(folder: Path, program: Program) -> TracedStep:
    """
    Return the last step in the newest trace of a run with this program.

    Among ranks with the same stages, the first rank is read. Raises UserError if there is no trace, or if the trace
    belongs to another program.
    """
    program = merge_split_backwards(program)
    paths = find_newest_trace_files(folder, program.ranks)
    ranks = [_read_last_step_action_spans(paths[rank * len(paths) // program.ranks]) for rank in range(program.ranks)]
    spans: list[Span] = []
    for rank, actions in enumerate(ranks):
        for row in range(*program.bounds[rank : rank + 2]):
            if (name := str(program.action(row))) not in actions:
                text = f"has no {name} on rank {rank} of the pipeline"
                raise UserError(f"{folder}: its trace {text}, so it belongs to another recipe; trace the run again")
            spans.append(actions[name])
    times = np.array(spans) - min(start for start, _ in spans)
    return TracedStep(program, times[:, 0], times[:, 1])


def find_newest_trace_files(folder: Path, multiple: int) -> Sequence[Path]:
    """Return the newest complete trace's files by rank; their number is a multiple of the pipeline ranks."""
    traces: dict[tuple[int, int], dict[int, Path]] = {}
    for path in (folder / "traces").glob("*.json.gz"):
        if match := FILE.fullmatch(path.name):
            first, last, rank = map(int, match.groups())
            traces.setdefault((last, first), {})[rank] = path
    if not traces:
        text = "it has no traces; let its recipe extend with_profiler, or add the node listeners.profiler"
        raise UserError(f"{folder}: {text}, and run some steps", 2)
    # A run that was killed while it wrote a trace leaves files of some ranks only.
    most = max(map(len, traces.values()))
    newest = traces[max(steps for steps, files in traces.items() if len(files) == most)]
    if most % multiple or max(newest) >= most:
        text = f"it has traces of rank {', '.join(map(str, sorted(newest)))} alone"
        raise UserError(f"{folder}: {text}; run some steps again until all ranks have written a trace", 2)
    return [newest[rank] for rank in sorted(newest)]


class TracedOperation(NamedTuple):
    """Operation on a GPU or, in a CPU's trace, of torch; `issued` is when the host began it."""

    issued: float
    span: Span
    name: str


@attrs.frozen
class Trace:
    """Named ranges of the host as (start, end, name), and operations, all sorted by time."""

    ranges: Sequence[tuple[float, float, str]]
    on_gpu: Sequence[TracedOperation]
    on_cpu: Sequence[TracedOperation]


def read_trace(path: Path) -> Trace:
    """Read a trace file. Raises UserError if it is not a trace."""
    try:
        with open_regular_file(path) as file, open(file.descriptor, "rb", closefd=False) as packed:
            trace = json.loads(gzip.decompress(packed.read()))
        base = trace.get("baseTimeNanoseconds", 0)
        events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        ranges, on_cpu = (
            sorted((*_compute_event_span(event, base), event["name"]) for event in events if event.get("cat") == kind)
            for kind in ("user_annotation", "cpu_op")
        )
        operations = [TracedOperation(begin, (begin, end), name) for begin, end, name in on_cpu]
        return Trace(ranges, _list_gpu_operations(events, base), operations)
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} can't be read as a trace: {error}; remove it, or trace the run again") from error


def _read_last_step_action_spans(path: Path) -> dict[str, Span]:
    """Return the spans of the last step's actions by name, without waits for messages; GPU time if the trace has it."""
    trace = read_trace(path)
    spans = trace.ranges
    launched = [operation for operation in trace.on_gpu if "nccl" not in operation.name.lower()]
    start = max((start for start, _, name in spans if STEP.fullmatch(name)), default=0.0)
    waits = [(begin, end) for begin, end, name in spans if name == WAIT and begin >= start]
    actions: dict[str, Span] = {}
    for begin, end, name in spans:
        # A validation in the same step comes later, and its forward passes have the same names.
        if begin >= start and name not in actions:
            actions[name] = _find_gpu_span(launched, begin, end) or (_find_start_after_waits(waits, begin, end), end)
    return actions


def _list_gpu_operations(events: Sequence[Mapping[str, Any]], base: int) -> list[TracedOperation]:
    """Return all GPU operations, sorted by their issue; none in a CPU trace."""
    issued = {
        event["args"]["correlation"]: _compute_event_span(event, base)[0]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    return sorted(
        TracedOperation(issued[event["args"]["correlation"]], _compute_event_span(event, base), event["name"])
        for event in events
        if event.get("cat") in ON_GPU and event["args"].get("correlation") in issued
    )


ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def _find_gpu_span(launched: Sequence[TracedOperation], begin: float, end: float) -> Span | None:
    """
    Return the span of the GPU operations issued during a host span, or None if there are none.

    torch's GPU ranges omit backward passes, because an autograd thread issues their operations.
    """
    first, last = (bisect_left(launched, moment, key=attrgetter("issued")) for moment in (begin, end))
    spans = [operation.span for operation in launched[first:last]]
    return (min(start for start, _ in spans), max(end for _, end in spans)) if spans else None


def _compute_event_span(event: Mapping[str, Any], base: int) -> Span:
    """Return an event's start and end in seconds."""
    # Nanoseconds since 1970 have more digits than a float; nanoseconds of a day do not.
    start = base % (86_400 * 10**9) / 1e9 + float(event["ts"]) / 1e6
    return start, start + float(event["dur"]) / 1e6


def _find_start_after_waits(waits: Sequence[Span], begin: float, end: float) -> float:
    """Return when an action's computation starts: the end of its waits."""
    return max((until for start, until in waits if begin <= start and until <= end), default=begin)
