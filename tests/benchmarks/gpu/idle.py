"""
GPU idle time in 20 steps of a run, and how often the host waits for the GPU: `make bench NAME=idle`.

`drawloom run first_run` trains in the shape of Qwen3-0.6B on 4 rows of 4096 bytes from the standard library's source,
with float32 master weights, clipping, AdamW and metrics at every step. The profiler traces 20 consecutive steps, one
with a checkpoint and one with an evaluation; earlier checkpoints and evaluations have allocated the buffers and
compiled the kernels. The trace shows

- the idle time between the first and the last kernel: time without kernels and copies, and time without kernels; the
  share of gaps up to 0.01 ms, as between any two kernels; and the same without the steps of checkpoint and evaluation.
  Idle time at the end of a step counts for this step;
- the longest gaps, the host's activity in them, and the operation that ended a gap: an operation issued within the gap
  waited for the host, one issued earlier for another stream;
- the calls that make the host wait for the GPU, and how many of them took longer than 0.05 ms.

Tracing slows the host down, so that these idle times are upper bounds; compare the tokens per second of the untraced
steps before and after. With FOLDER=/path the run's folder is created there and kept. Given the path of a trace, the
benchmark reads it and starts no run. `--tiny` uses a CPU, and treats CPU operations as GPU operations.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from benchmarks.gpu.timeline import ON_GPU, OTHER, Interval, Timeline, read

TINY = "--tiny" in sys.argv
STEPS = 20
CHECKPOINT, EVALUATION = (20, 16) if TINY else (50, 35)
"""Steps between two checkpoints, and between two evaluations."""
FIRST = 11 if TINY else 91
LAST, END = FIRST + STEPS - 1, FIRST + STEPS + 9
WARM_UPS = 2
LIMIT = 60 if TINY else 300
"""Seconds after which the run is stopped, and its files are read."""
SHORT, LONG = 0.01, 0.05
"""Milliseconds. Gaps up to SHORT occur between any two kernels; longer waits than LONG are reported."""
LONGEST = 5
PRINTED_LINES = ("model ", "memory ", "step ", "checkpoint ", "warning: no more traces")
"""First words of the run's printed lines."""

Gaps = dict[int, list[Interval]]

SIZES = [
    *("vars.length=4096", "model.num_hidden_layers=28", "model.hidden_size=1024", "model.intermediate_size=3072"),
    *("model.num_attention_heads=16", "model.num_key_value_heads=8", "model.head_dim=128", "model.rope_theta=1e6"),
    *("model.vocab_size=151936", "model.max_position_embeddings=40960"),
]
"""Sizes of the recipe qwen3_0_6b."""
RUN = [
    *("batch.global_size=4", "batch.micro_size=4", "optimizer.lr=3e-4", f"trainer.steps={END}", "trainer.on_finish=[]"),
    *("staging.use=checkpoint.staging.overlapped", f"checkpoint.every={CHECKPOINT}", "checkpoint.keep=1"),
    *(f"evaluate.every={EVALUATION}", "validation.rows_used=16", f"listeners.profiler.wait={FIRST - 1 - WARM_UPS}"),
    *(f"listeners.profiler.warmup={WARM_UPS}", f"listeners.profiler.active={STEPS}"),
]


def main() -> None:
    """Run, and print figures from the trace and the metrics. Unreadable files are reported."""
    traces = [Path(word) for word in sys.argv[1:] if word.endswith(".json.gz")]
    if traces:
        return _print("trace", lambda: _report_trace(traces[0]))
    if not torch.cuda.is_available() and not TINY:
        sys.exit("there is no GPU here; --tiny tries the benchmark on a CPU")
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    print(f"torch {torch.__version__} on {where}; steps {FIRST} to {LAST}, checkpoint and evaluation in", end=" ")
    print(f"{_last_step_of(CHECKPOINT)} and {_last_step_of(EVALUATION)}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(tempfile.mkdtemp(prefix="idle-", dir=os.environ.get("FOLDER", temporary))) / "run"
        _print("run", lambda: _run(folder))
        _print("metrics", lambda: _report_metrics(folder / "metrics.jsonl"))
        _print("trace", lambda: _report_trace(folder / "traces" / f"steps-{FIRST}-{LAST}-rank-0.json.gz"))


def _print(source: str, lines: Callable[[], Iterator[str]]) -> None:
    try:
        for line in lines():
            print(line, flush=True)
    except Exception as failure:  # GPU time is scarce: print the remaining results
        print(f"{source}: {type(failure).__name__}: {failure}", flush=True)


def _run(folder: Path) -> Iterator[str]:
    """Run drawloom, and yield its step lines, or the end of its output if it failed."""
    overlays = ["--overlay", "with_profiler", *([] if TINY else ["--overlay", "with_mixed_precision"])]
    sizes = ["vars.length=32"] if TINY else SIZES
    command = [sys.executable, "-m", "drawloom", "run", "first_run", *overlays, *sizes, *RUN, f"run.folder={folder}"]
    device = ["device.kind=cpu"] if TINY else []
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        try:
            code = subprocess.run(
                [*command, *device], stdout=output, stderr=subprocess.STDOUT, timeout=LIMIT, check=False
            ).returncode
            ended = f"ended with {code}"
        except subprocess.TimeoutExpired:
            code, ended = -1, "did not end"
        output.seek(0)
        lines = output.read().splitlines()
    yield from [line for line in lines if line.startswith(PRINTED_LINES)] if code == 0 else lines[-40:]
    yield f"the run {ended} after {time.monotonic() - began:.0f} s"


def _report_metrics(path: Path) -> Iterator[str]:
    """Yield the run's own tokens per second of traced and untraced steps without checkpoint and evaluation."""
    speeds: dict[int, float] = {}
    for line in path.read_text("utf-8").splitlines():
        row = json.loads(line)
        speeds[row["step"]] = row.get("tokens_per_second", 0.0)  # step 0 has none
    parts = {
        "before": range(FIRST // 3, FIRST - WARM_UPS),
        "traced": range(FIRST, LAST + 1),
        "after": range(LAST + 2, END),
    }
    for name, steps in parts.items():
        step_speeds = [speeds[step] for step in steps if step in speeds and step % CHECKPOINT and step % EVALUATION]
        if step_speeds:
            middle = statistics.median(step_speeds)
            yield f"tokens/s {name}: median {middle:,.0f}, {min(step_speeds):,.0f} to {max(step_speeds):,.0f}"


def _report_trace(path: Path) -> Iterator[str]:
    timeline = read(path, ("cpu_op",) if TINY else ON_GPU)
    spans = timeline.spans
    yield f"{path.name}: {len(timeline.steps)} steps, {len(spans)} of them with kernels, {path.stat().st_size:,} bytes"
    if timeline.steps:
        host = max(end for _, end in timeline.steps.values()) - min(start for start, _ in timeline.steps.values())
        yield f"the host went through them in {host:,.1f} ms"
    gaps, without_kernels = timeline.gaps(), timeline.gaps(kernels_alone=True)
    parts, apart = {"all steps": {*spans}}, {*spans} & {_last_step_of(CHECKPOINT), _last_step_of(EVALUATION)}
    if apart:
        parts[f"without {' and '.join(map(str, sorted(apart)))}"] = {*spans} - apart
    for name, steps in parts.items():
        whole = sum(spans[step][1] - spans[step][0] for step in steps)
        if whole:
            idle, short = _idle_milliseconds(gaps, steps), _idle_milliseconds(gaps, steps, SHORT)
            text = f"{whole:,.1f} ms, busy {whole - idle:,.1f}, idle {idle:.1f} = {idle / whole:.2%}"
            text += f", of it {short / whole:.2%} in gaps of {SHORT} ms at most"
            yield f"{name}: {text}; no kernel in {_idle_milliseconds(without_kernels, steps) / whole:.2%}"
    by_step = (
        f"{step}: {end - start:.1f} {_idle_milliseconds(gaps, [step]):.1f}" for step, (start, end) in spans.items()
    )
    yield f"each step's ms, and ms idle: {', '.join(by_step)}"
    yield from _report_longest(timeline, gaps)
    yield from _report_waits(timeline)


def _last_step_of(every: int) -> int:
    """Return the last traced step that is a multiple of `every`."""
    return LAST // every * every


def _idle_milliseconds(gaps: Gaps, steps: Iterable[int], at_most: float = math.inf) -> float:
    """Return the milliseconds of the steps' gaps up to a length."""
    lengths = (end - start for step in steps for start, end in gaps[step])
    return sum(length for length in lengths if length <= at_most)


def _report_longest(timeline: Timeline, gaps: Gaps) -> Iterator[str]:
    yield "longest gaps:"
    longest_first = [(end - start, step, (start, end)) for step, step_gaps in gaps.items() for start, end in step_gaps]
    for length, step, gap in sorted(longest_first, reverse=True)[:LONGEST]:
        at = f"{length:.3f} ms in step {step} at {gap[0] - timeline.spans[step][0]:.1f}"
        yield f"  {at}; host: {timeline.doing(gap)}; then {timeline.after(gap)}"


def _report_waits(timeline: Timeline) -> Iterator[str]:
    steps = len(timeline.steps)
    waits = timeline.waits()
    yield f"host waits, a step: {len(waits) / max(steps, 1):.2f}"
    names = Counter((name, thread) for _, name, thread, _ in waits)
    for (name, thread), count in names.most_common():
        durations = [milliseconds for _, *which, milliseconds in waits if which == [name, thread]]
        long = sum(milliseconds > LONG for milliseconds in durations)
        text = f"  {name}, {thread}: {count / steps:.2f}, longer than {LONG} ms {long / steps:.2f}"
        yield f"{text}, {sum(durations) / steps:.2f} ms a step, at most {max(durations):.2f}"
    long_ones = Counter(step for step, _, thread, milliseconds in waits if milliseconds > LONG and thread != OTHER)
    several = {step: count for step, count in sorted(long_ones.items()) if count > 1}
    yield f"steps with several waits longer than {LONG} ms of threads that train, and how many: {several or 'none'}"


if __name__ == "__main__":
    main()
