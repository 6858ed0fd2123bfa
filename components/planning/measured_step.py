"""Measured seconds in a run's steps, by operation if the run was traced."""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

import attrs

from drawloom import UserError
from drawloom.components.planning.check import WARM_UP_STEPS
from drawloom.components.planning.recorder import ATTENTION, ELEMENTWISE, PRODUCTS
from drawloom.components.planning.traces import ACTION, STEP, Span, TracedOperation, find_newest_trace_files, read_trace
from drawloom.components.storage.regular_file import open_regular_file

UPDATE, WAITING, WHOLE_STEP = "update", "exchanges and waiting", "step"
"""
Kinds besides the operations in passes: operations after the last pass, time in which the device does nothing or only
exchanges messages, and the sum.
"""

NAMES = {
    ATTENTION: ("sdpa", "attention", "fmha", "flash", "cudnn::fusion"),
    PRODUCTS: (
        *("gemm", "nvjet", "cutlass", "xmma", "_rows_kernel", "_outer_products_kernel", "_groups_kernel"),
        *("logit_kernel", "logits_kernel", "grad_hidden_kernel", "grad_weight_kernel", "::mm", "::addmm", "::bmm"),
    ),
}
"""Substrings in names: GPU kernels and, in a CPU's trace, operations, all in lower case; the first match counts."""


@attrs.frozen
class MeasuredStep:
    """Where seconds were measured, in words, and the seconds in a step by kind, as far as they are known."""

    source: str
    seconds: Mapping[str, float] = attrs.field(factory=dict)


def read_measured_step(folder: Path, pipeline_ranks: int, rank: int) -> MeasuredStep:
    """Read a pipeline rank's newest trace, or else the median step in `metrics.jsonl`."""
    seconds = _read_seconds_of_steps(folder / "metrics.jsonl")
    median = statistics.median(seconds[WARM_UP_STEPS:] or seconds or [0.0])
    if (folder / "traces").is_dir():
        paths = find_newest_trace_files(folder, pipeline_ranks)
        path = paths[rank * len(paths) // pipeline_ranks]
        return MeasuredStep(f"{path.name}; an untraced step takes {median:.3g} s", _read_seconds_by_kind(path))
    if not median:
        return MeasuredStep("nothing, because `metrics.jsonl` has no steps with metrics.phase_times")
    return MeasuredStep("whole steps; --overlay with_profiler measures kinds of operations", {WHOLE_STEP: median})


def _read_seconds_of_steps(path: Path) -> list[float]:
    """Return the seconds by step without excluded ones; nothing if the file is missing."""
    seconds: list[float] = []
    if path.is_file():
        with open_regular_file(path) as file, open(file.descriptor, "rb", closefd=False) as lines:
            for line in lines:
                with suppress(ValueError, KeyError, TypeError):  # an incomplete line, or no phase times
                    row = json.loads(line)
                    seconds.append(row["seconds/step"] - row.get("seconds/excluded", 0.0))
    return seconds


def _read_seconds_by_kind(path: Path) -> dict[str, float]:
    """Read the mean seconds in a traced step by kind; every moment counts for one kind."""
    trace = read_trace(path)
    steps = [(begin, end) for begin, end, name in trace.ranges if STEP.fullmatch(name)]
    spans: dict[str, list[Span]] = defaultdict(list)
    for begin, end in steps:
        ends = [until for _, until, name in trace.ranges if begin < until <= end and ACTION.fullmatch(name)]
        for operation in trace.on_gpu or trace.on_cpu:
            if begin <= operation.issued < end:
                spans[_choose_kind(operation, max(ends, default=end))].append(operation.span)
    if not spans:
        raise UserError(f"{path} has no operations in steps; remove it, or trace the run again")
    moments = [moment for span in chain(*spans.values()) for moment in span]
    seconds = {WHOLE_STEP: max(moments) - min(moments)}
    covered, so_far = 0.0, list[Span]()
    for kind in (UPDATE, ATTENTION, PRODUCTS, ELEMENTWISE):  # a CPU's operations contain one another
        so_far += spans[kind]
        before, covered = covered, _count_covered_seconds(so_far)
        seconds[kind] = covered - before
    seconds[WAITING] = seconds[WHOLE_STEP] - covered
    return {kind: total / len(steps) for kind, total in seconds.items()}


def _choose_kind(operation: TracedOperation, end_of_passes: float) -> str:
    """Return an operation's kind, by its name and the time when the host issued it."""
    name = operation.name.lower()
    if "nccl" in name:
        return WAITING
    if operation.issued >= end_of_passes:
        return UPDATE
    return next((kind for kind, parts in NAMES.items() if any(part in name for part in parts)), ELEMENTWISE)


def _count_covered_seconds(spans: Sequence[Span]) -> float:
    """Return the seconds covered by spans."""
    covered, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered
