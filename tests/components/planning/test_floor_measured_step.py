"""Measured seconds of steps."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from drawloom.components.planning.floor import UPDATE, WAITING, WHOLE_STEP, read_measured_step
from drawloom.components.planning.stage_costs import ATTENTION, ELEMENTWISE, PRODUCTS
from drawloom.graph import UserError

RANGES = {
    "step 3": (0, 50),
    "0F0": (0, 20),
    "0B0": (20, 40),
    "step 4": (100, 150),
    "0F0 ": (100, 120),
    "0B0 ": (120, 140),
}


def write_trace(folder: Path, operations: Sequence[tuple[str, float, float, float]], on_gpu: bool) -> None:
    """Write a trace with operations as (name, issue, start, end); spaces behind a name distinguish equal names."""
    ranges = [
        {"ph": "X", "cat": "user_annotation", "name": name.strip(), "ts": start, "dur": end - start}
        for name, (start, end) in RANGES.items()
    ]
    events = list[dict[str, object]]()
    for number, (name, issued, start, end) in enumerate(operations):
        event: dict[str, object] = {"ph": "X", "name": name, "args": {"correlation": number}}
        events.append(event | {"cat": "kernel" if on_gpu else "cpu_op", "ts": start, "dur": end - start})
        if on_gpu:
            events.append(event | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": issued, "dur": 0.5})
    (folder / "traces").mkdir()
    with gzip.open(folder / "traces/steps-3-4-rank-0.json.gz", "wt") as file:
        json.dump({"traceEvents": ranges + events}, file)


def test_every_moment_of_a_gpu_counts_for_one_kind(tmp_path: Path) -> None:
    """
    Operations count by name or, if the host issued them after the last pass, as update; messages count only where no
    operation runs, and the mean of both steps is measured.
    """
    operations = [
        ("nvjet_tst_128x256", 1, 10, 30),
        ("cudnn_generated_fort_native_sdpa_sm90_flash", 2, 30, 36),
        ("ncclDevKernel_AllGather", 3, 20, 44),
        ("vectorized_elementwise_kernel", 4, 44, 48),
        ("multi_tensor_apply_kernel", 45, 50, 60),
        ("nvjet_tst_128x256", 101, 110, 190),
        ("nvjet_before_the_first_step", -5, 0, 9),
    ]
    write_trace(tmp_path, operations, on_gpu=True)
    seconds = read_measured_step(tmp_path, 1, 0).seconds
    halves = {PRODUCTS: 100, ATTENTION: 6, ELEMENTWISE: 4, UPDATE: 10, WAITING: 60, WHOLE_STEP: 180}
    assert seconds == pytest.approx({kind: half / 2 * 1e-6 for kind, half in halves.items()})


def test_operations_of_a_cpu_count_without_those_inside(tmp_path: Path) -> None:
    """A product inside another operation counts once, and as product."""
    operations = [
        ("aten::linear", 0, 0, 20),
        ("aten::mm", 2, 2, 18),
        ("aten::_fused_adamw_", 141, 141, 149),
        ("aten::mul", 100, 100, 110),
    ]
    write_trace(tmp_path, operations, on_gpu=False)
    seconds = read_measured_step(tmp_path, 1, 0).seconds
    halves = {PRODUCTS: 16, ATTENTION: 0, ELEMENTWISE: 14, UPDATE: 8, WAITING: 111, WHOLE_STEP: 149}
    assert seconds == pytest.approx({kind: half / 2 * 1e-6 for kind, half in halves.items()})


def test_a_run_without_a_trace_has_its_median_step(tmp_path: Path) -> None:
    """Excluded seconds and the first two steps do not count; without metrics, the source says so."""
    assert read_measured_step(tmp_path, 1, 0).seconds == {}
    assert "has no steps" in read_measured_step(tmp_path, 1, 0).source
    rows = [{"step": step, "seconds/step": seconds} for step, seconds in enumerate((9.0, 8.0, 1.0, 3.0, 2.5), 1)]
    rows[3]["seconds/excluded"] = 1.0
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    measured = read_measured_step(tmp_path, 1, 0)
    assert measured.seconds == {WHOLE_STEP: 2.0}
    assert "with_profiler" in measured.source


def test_a_trace_without_operations_is_refused(tmp_path: Path) -> None:
    """The error names the file and a remedy."""
    write_trace(tmp_path, [], on_gpu=True)
    with pytest.raises(UserError, match=r"steps-3-4-rank-0\.json\.gz has no operations in steps; remove it"):
        read_measured_step(tmp_path, 1, 0)
