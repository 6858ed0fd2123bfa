"""Traces of runs as timelines."""

import gzip
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from drawloom.components.pipeline.runtime.p2p import WAIT
from drawloom.components.planning.cost_sources import read_traced_step
from drawloom.graph import UserError
from support.schedules import parse_program

PROGRAM = parse_program("0: 0F0 0B0\n1: 1F0 1I0 1W0\n")
RANKS = (
    {"step 3": (0, 90), "0F0": (0, 10), "step 4": (100, 160), "0F0 ": (110, 130), "0B0": (131, 155), WAIT: (132, 145)},
    {"step 4": (100, 160), "1F0": (112, 138), WAIT: (113, 134), "1I0": (138, 143), "1W0": (143, 150)},
)


def write(
    folder: Path, rank: int, spans: Mapping[str, tuple[float, float]], more: Sequence[dict[str, object]] = ()
) -> None:
    """Write a trace in torch's format, with spans in microseconds; spaces behind a name distinguish equal names."""
    (folder / "traces").mkdir(exist_ok=True)
    events = [
        {"ph": "X", "cat": "user_annotation", "name": name.strip(), "ts": start - rank * 1e6, "dur": end - start}
        for name, (start, end) in spans.items()
    ]
    others = [{"ph": "X", "cat": "cpu_op", "name": "0F0", "ts": 101, "dur": 1}, {"ph": "M", "name": "process_name"}]
    trace = {"baseTimeNanoseconds": (7 + rank) * 10**9, "traceEvents": [*others, *events, *more]}
    with gzip.open(folder / f"traces/steps-3-4-rank-{rank}.json.gz", "wt") as file:
        json.dump(trace, file)


def test_the_last_step_is_read_without_waits(tmp_path: Path) -> None:
    """On one clock, whichever origin each rank's trace has; a message takes the least time from its end to its use."""
    for rank, spans in enumerate(RANKS):
        write(tmp_path, rank, spans)
    traced = read_traced_step(tmp_path, PROGRAM)
    assert (traced.start * 1e6).round(3).tolist() == [0, 35, 24, 28, 33]
    assert (traced.end * 1e6).round(3).tolist() == [20, 45, 28, 33, 40]
    table = traced.compute_cost_table()
    assert (table.lengths[1] * 1e6).round(3).tolist() == [4, 12, 5, 7]
    assert (table.lengths[0] * 1e6).round(3).tolist() == [20, 10, 5, 5]
    assert table.comm * 1e6 == pytest.approx(2)
    assert traced.simulation.makespan * 1e6 == pytest.approx(45)


def test_operations_of_a_gpu_count_and_not_the_host_that_issues_them(tmp_path: Path) -> None:
    """An action lasts from its first to its last operation on the GPU, whichever thread issued it, without messages."""
    host = {"step 4": (100, 130), "0F0": (101, 104), "0B0": (104, 110), "0B0 ": (90, 95)}
    operations = [  # issued, began, ended
        ("gemm", 102, 120, 130),
        ("ncclDevKernel_SendRecv", 103, 130, 190),
        ("norm", 103.5, 131, 140),
        ("Memcpy", 105, 142, 150),
        ("gemm", 109, 150, 171),
    ]
    events: list[dict[str, object]] = []
    for number, (name, issued, began, ended) in enumerate(operations):
        same = {"ph": "X", "args": {"correlation": number}}
        events.append(same | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": issued, "dur": 0.5})
        kind = "gpu_memcpy" if name == "Memcpy" else "kernel"
        events.append(same | {"cat": kind, "name": name, "ts": began, "dur": ended - began})
    events.append({"ph": "X", "cat": "gpu_user_annotation", "name": "0F0", "ts": 120, "dur": 70})
    write(tmp_path, 0, host, more=events)
    traced = read_traced_step(tmp_path, parse_program("0: 0F0 0B0\n"))
    assert (traced.start * 1e6).round(3).tolist() == [0, 22]
    assert (traced.end * 1e6).round(3).tolist() == [20, 51]


def test_a_trace_that_some_ranks_have_not_written_is_passed_over(tmp_path: Path) -> None:
    """In a run killed meanwhile the newest trace from all ranks counts; without one there is an error."""
    for rank, spans in enumerate(RANKS):
        write(tmp_path, rank, spans)
    traced, whole = read_traced_step(tmp_path, PROGRAM), tmp_path / "traces/steps-3-4-rank-0.json.gz"
    for later in (tmp_path / "traces/steps-7-8-rank-0.json.gz", tmp_path / "traces/steps-9-9-rank-1.json.gz"):
        shutil.copy(whole, later)
    assert read_traced_step(tmp_path, PROGRAM).end.tolist() == traced.end.tolist()
    for rank in (0, 1):
        (tmp_path / f"traces/steps-3-4-rank-{rank}.json.gz").unlink()
    with pytest.raises(UserError, match="has traces of rank 1 alone; run some steps again until all ranks"):
        read_traced_step(tmp_path, PROGRAM)


def test_an_unsuitable_trace_is_refused(tmp_path: Path) -> None:
    """A missing folder, another recipe and a broken file have one sentence each."""
    with pytest.raises(UserError, match="has no traces; let its recipe"):
        read_traced_step(tmp_path, PROGRAM)
    for rank, spans in enumerate(RANKS):
        write(tmp_path, rank, spans)
    with pytest.raises(UserError, match="no 0F1 on rank 0 of the pipeline"):
        read_traced_step(tmp_path, parse_program("0: 0F0 0F1 0B0 0B1\n"))
    (tmp_path / "traces/steps-3-4-rank-1.json.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(UserError, match="can't be read as a trace"):
        read_traced_step(tmp_path, PROGRAM)
