"""Timelines of a hand-written trace with two steps."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.timeline import Timeline, parse, read

HOST, AUTOGRAD, WRITER, STREAM = 10, 11, 12, 7


def event(category: str, name: str, start: float, length: float, thread: int = HOST, **args: Any) -> dict[str, Any]:
    """Return an event in kineto's format, in microseconds, long after time 0."""
    times = {"ts": 5_000_000.0 + start, "dur": length}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, **times, "args": args}


def launch(name: str, issued: float, start: float, length: float, number: int, on: str = "kernel") -> list[Any]:
    """Return a GPU operation and the host call that launched it."""
    call = event("cuda_runtime", "cudaLaunchKernel", issued, 4, correlation=number)
    return [call, event(on, name, start, length, STREAM, correlation=number)]


TRACE: dict[str, Any] = {
    "schemaVersion": 1,
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "pid": 1, "tid": HOST, "ts": 5_000_010.0, "id": 1},
        event("user_annotation", "ProfilerStep#4", -5, 1005),
        event("gpu_user_annotation", "step 5", 100, 900, STREAM),
        event("user_annotation", "step 5", 0, 1000),
        event("user_annotation", "step 6", 1000, 1000),
        # an operation of the step before the trace, still running when the trace begins
        *launch("earlier", -400, 0, 90, 1),
        # the first step: two kernels with a copy beside the second, one without a known launch, and a gap of 300
        *launch("embedding", 20, 100, 200, 2),
        *launch("Memcpy HtoD", 40, 350, 100, 3, "gpu_memcpy"),
        *launch("product", 30, 300, 100, 4),
        event("kernel", "by the driver", 450, 250, STREAM, correlation=99),
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 500, 50, AUTOGRAD),
        event("cuda_runtime", "cudaEventSynchronize", 510, 30, AUTOGRAD),
        event("user_annotation", "checkpoint", 690, 280),
        event("cpu_op", "aten::copy_", 695, 260),
        event("cuda_runtime", "cudaStreamSynchronize", 700, 200),
        event("cuda_runtime", "cudaStreamSynchronize", 720, 2, WRITER),
        event("cpu_op", "aten::empty", 960, 5),
        # the second step, in which a product that was issued long ago waits for another stream
        *launch("embedding", 1010, 1030, 370, 5),
        *launch("product", 1020, 1500, 400, 6),
        event("cuda_runtime", "cudaMemcpyAsync", 1030, 3, correlation=7),
        event("cuda_runtime", "cudaEventQuery", 1040, 1),
        event("cuda_runtime", "cudaMemcpy", 1050, 40, correlation=8),
        # after both: the end of the profiler waits
        event("cuda_runtime", "cudaDeviceSynchronize", 2100, 500),
        event("gpu_memcpy", "Memcpy DtoH", 2300, 100, STREAM, correlation=7),
    ],
}


@pytest.fixture
def timeline() -> Timeline:
    """Return the timeline of TRACE."""
    return parse(TRACE)


def ms(*times: float) -> Any:
    """Convert the trace's microseconds to milliseconds since its first event."""
    return pytest.approx([(time + 400) / 1e3 for time in times])


def test_step_span_ends_at_first_kernel_of_next_step(timeline: Timeline) -> None:
    """Spans are contiguous from the first kernel issued within a step to the end of the last kernel."""
    assert [*timeline.spans] == [5, 6]
    assert [*timeline.spans[5]] == ms(100, 1030) and [*timeline.spans[6]] == ms(1030, 1900)


def test_gaps_are_intervals_without_operations_on_any_stream(timeline: Timeline) -> None:
    """Kernels without a known launch fill time, and copies do unless `kernels_alone`; gaps are listed by step."""
    gaps_by_step = {step: [time for gap in gaps for time in gap] for step, gaps in timeline.gaps().items()}
    assert gaps_by_step == {5: ms(700, 1030), 6: ms(1400, 1500)}
    kernels = {step: [time for gap in gaps for time in gap] for step, gaps in timeline.gaps(kernels_alone=True).items()}
    assert kernels == {5: ms(400, 450, 700, 1030), 6: ms(1400, 1500)}


def test_idle_and_busy_time_add_up_to_the_spans(timeline: Timeline) -> None:
    """Idle time equals the number of microseconds without an operation."""
    operations = [operation for operation in TRACE["traceEvents"] if operation.get("cat") in ("kernel", "gpu_memcpy")]
    spans = [(operation["ts"] - 5_000_000, operation["ts"] - 5_000_000 + operation["dur"]) for operation in operations]
    idle = sum(not any(start <= time < end for start, end in spans) for time in range(100, 1900))
    idle_by_timeline = sum(end - start for gaps in timeline.gaps().values() for start, end in gaps)
    assert idle_by_timeline * 1e3 == pytest.approx(idle)


def test_waits_are_listed_by_step_name_and_thread(timeline: Timeline) -> None:
    """Asynchronous copies, event queries and the profiler's final wait are not counted as waits."""
    waits = [(step, name, thread) for step, name, thread, _ in timeline.waits()]
    assert waits == [
        (5, "cudaEventSynchronize", "autograd"),
        (5, "cudaStreamSynchronize", "the steps' thread"),
        (5, "cudaStreamSynchronize", "another thread"),
        (6, "cudaMemcpy", "the steps' thread"),
    ]
    assert [took * 1e3 for *_, took in timeline.waits()] == pytest.approx([30, 200, 2, 40])


def test_gap_report_names_activity_of_host(timeline: Timeline) -> None:
    """A gap report has the surrounding ranges without steps, the innermost call, and the count of short calls."""
    first, second = (gaps[0] for gaps in timeline.gaps().values())
    report = timeline.doing(first)
    assert report.split("; ")[0] == "checkpoint > cudaStreamSynchronize > 3 shorter ones"
    assert report.split("; ")[1:] == ["another thread: 1 shorter ones"]
    assert timeline.after(first) == "embedding, issued 0.31 ms into it"
    assert timeline.doing(second) == "nothing that is traced"
    assert timeline.after(second) == "product, issued 0.38 ms before it"


def test_trace_is_read_from_file(tmp_path: Path) -> None:
    """CPU operations can count as GPU operations, issued when they begin; an empty trace has no steps."""
    path = tmp_path / "steps-5-6-rank-0.json.gz"
    path.write_bytes(gzip.compress(json.dumps(TRACE).encode()))
    cpu_timeline = read(path, ("cpu_op",))
    assert [*cpu_timeline.spans] == [5] and [*cpu_timeline.spans[5]] == ms(500, 965)
    empty = parse({"traceEvents": []})
    assert empty.spans == {} and empty.gaps() == {} and empty.waits() == []
