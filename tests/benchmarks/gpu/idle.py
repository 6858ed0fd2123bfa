"""
How long the GPU does nothing in 20 steps of a run, and how often the host waits for it: `make bench-idle-gpu`.

`drawloom run first_run` in the shape of Qwen3-0.6B, 4 rows of 4096 bytes of the standard library's source a step, with
float32 masters, clipping, AdamW and metrics at every step. The profiler traces 20 steps in a row, with a checkpoint in
one and an evaluation in another; earlier ones of both have made their buffers and compiled their kernels. Of the trace:

- idle time, from the first kernel of the steps to the last: what no kernel and no copy fills, and what no kernel fills;
  how much of it are gaps of 0.01 ms at most, as between any two kernels; and all that without the steps of checkpoint
  and evaluation. What keeps the GPU idle at the end of a step is counted there;
- the longest gaps, what the host did in most of each, and what ended it: an operation that was issued only in the gap
  waited for the host, one that was issued before it for another stream;
- the calls with which the host waits for the GPU. Those that return at once, as of events that are over, are also
  counted, and how many took longer than 0.05 ms.

Tracing slows the host down, so that idle times are at most these; the tokens a second of steps before and after that
were not traced tell how much. With FOLDER=/path the run's folder is made there, and stays. Given the path of a trace
there is no run: that one is read. `--tiny` tries all on a CPU, whose operations it takes for a GPU's.
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
"""Steps between two of each."""
FIRST = 11 if TINY else 91
LAST, END = FIRST + STEPS - 1, FIRST + STEPS + 9
WARM_UPS = 2
LIMIT = 60 if TINY else 300
"""Seconds after which the run is ended, and what there is of it is read."""
SHORT, LONG = 0.01, 0.05
"""Milliseconds: a gap that is no longer is one between kernels, and a wait that is longer is one."""
LONGEST = 5
TOLD = ("model ", "memory ", "step ", "checkpoint ", "warning: no more traces")
"""What lines of the run that are printed begin with."""

Gaps = dict[int, list[Interval]]

SIZES = [
    *("vars.length=4096", "model.num_hidden_layers=28", "model.hidden_size=1024", "model.intermediate_size=3072"),
    *("model.num_attention_heads=16", "model.num_key_value_heads=8", "model.head_dim=128", "model.rope_theta=1e6"),
    *("model.vocab_size=151936", "model.max_position_embeddings=40960"),
]
"""Those of the recipe qwen3_0_6b."""
RUN = [
    *("batch.global_size=4", "batch.micro_size=4", "optimizer.lr=3e-4", f"trainer.steps={END}", "trainer.on_finish=[]"),
    *("staging.use=checkpoint.staging.overlapped", f"checkpoint.every={CHECKPOINT}", "checkpoint.keep=1"),
    *(f"evaluate.every={EVALUATION}", "validation.rows_used=16", f"listeners.profiler.wait={FIRST - 1 - WARM_UPS}"),
    *(f"listeners.profiler.warmup={WARM_UPS}", f"listeners.profiler.active={STEPS}"),
]


def main() -> None:
    """Run, and print what the trace and the metrics say; what can't be read is said so, and the rest is printed."""
    found = [Path(word) for word in sys.argv[1:] if word.endswith(".json.gz")]
    if found:
        return _print("trace", lambda: _of_trace(found[0]))
    if not torch.cuda.is_available() and not TINY:
        sys.exit("there is no GPU here; --tiny tries the benchmark on a CPU")
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    print(f"torch {torch.__version__} on {where}; steps {FIRST} to {LAST}, checkpoint and evaluation in", end=" ")
    print(f"{_step_of(CHECKPOINT)} and {_step_of(EVALUATION)}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(tempfile.mkdtemp(prefix="idle-", dir=os.environ.get("FOLDER", temporary))) / "run"
        _print("run", lambda: _run(folder))
        _print("metrics", lambda: _of_metrics(folder / "metrics.jsonl"))
        _print("trace", lambda: _of_trace(folder / "traces" / f"steps-{FIRST}-{LAST}-rank-0.json.gz"))


def _print(what: str, lines: Callable[[], Iterator[str]]) -> None:
    try:
        for line in lines():
            print(line, flush=True)
    except Exception as failure:  # a machine with a GPU is lent for minutes: whatever else there is is worth printing
        print(f"{what}: {type(failure).__name__}: {failure}", flush=True)


def _run(folder: Path) -> Iterator[str]:
    """Run drawloom; its lines of steps, or the end of what it wrote."""
    overlays = ["--overlay", "with_profiler", *([] if TINY else ["--overlay", "with_mixed_precision"])]
    sizes = ["vars.length=32"] if TINY else SIZES
    command = [sys.executable, "-m", "drawloom", "run", "first_run", *overlays, *sizes, *RUN, f"run.folder={folder}"]
    device = ["device.kind=cpu"] if TINY else []
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as written:
        try:
            code = subprocess.run(
                [*command, *device], stdout=written, stderr=subprocess.STDOUT, timeout=LIMIT, check=False
            ).returncode
            ended = f"ended with {code}"
        except subprocess.TimeoutExpired:
            code, ended = -1, "did not end"
        written.seek(0)
        lines = written.read().splitlines()
    yield from [line for line in lines if line.startswith(TOLD)] if code == 0 else lines[-40:]
    yield f"the run {ended} after {time.monotonic() - began:.0f} s"


def _of_metrics(path: Path) -> Iterator[str]:
    """Tokens a second by the run itself, of steps that were traced and not, without checkpoint and evaluation."""
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
        some = [speeds[step] for step in steps if step in speeds and step % CHECKPOINT and step % EVALUATION]
        if some:
            yield f"tokens/s {name}: median {statistics.median(some):,.0f}, {min(some):,.0f} to {max(some):,.0f}"


def _of_trace(path: Path) -> Iterator[str]:
    timeline = read(path, ("cpu_op",) if TINY else ON_GPU)
    spans = timeline.spans
    yield f"{path.name}: {len(timeline.steps)} steps, {len(spans)} of them with kernels, {path.stat().st_size:,} bytes"
    if timeline.steps:
        host = max(end for _, end in timeline.steps.values()) - min(start for start, _ in timeline.steps.values())
        yield f"the host went through them in {host:,.1f} ms"
    gaps, without_kernels = timeline.gaps(), timeline.gaps(kernels_alone=True)
    parts, apart = {"all steps": {*spans}}, {*spans} & {_step_of(CHECKPOINT), _step_of(EVALUATION)}
    if apart:
        parts[f"without {' and '.join(map(str, sorted(apart)))}"] = {*spans} - apart
    for name, steps in parts.items():
        whole = sum(spans[step][1] - spans[step][0] for step in steps)
        if whole:
            idle, short = _idle(gaps, steps), _idle(gaps, steps, SHORT)
            text = f"{whole:,.1f} ms, busy {whole - idle:,.1f}, idle {idle:.1f} = {idle / whole:.2%}"
            text += f", of it {short / whole:.2%} in gaps of {SHORT} ms at most"
            yield f"{name}: {text}; no kernel in {_idle(without_kernels, steps) / whole:.2%}"
    by_step = (f"{step}: {end - start:.1f} {_idle(gaps, [step]):.1f}" for step, (start, end) in spans.items())
    yield f"each step's ms, and ms idle: {', '.join(by_step)}"
    yield from _longest(timeline, gaps)
    yield from _waits(timeline)


def _step_of(every: int) -> int:
    """The step among those traced."""
    return LAST // every * every


def _idle(gaps: Gaps, steps: Iterable[int], at_most: float = math.inf) -> float:
    """Milliseconds of some steps' gaps, of those that are not longer than some."""
    lengths = (end - start for step in steps for start, end in gaps[step])
    return sum(length for length in lengths if length <= at_most)


def _longest(timeline: Timeline, gaps: Gaps) -> Iterator[str]:
    yield "longest gaps:"
    every = [(end - start, step, (start, end)) for step, found in gaps.items() for start, end in found]
    for length, step, gap in sorted(every, reverse=True)[:LONGEST]:
        at = f"{length:.3f} ms in step {step} at {gap[0] - timeline.spans[step][0]:.1f}"
        yield f"  {at}; host: {timeline.doing(gap)}; then {timeline.after(gap)}"


def _waits(timeline: Timeline) -> Iterator[str]:
    steps = len(timeline.steps)
    waits = timeline.waits()
    yield f"host waits, a step: {len(waits) / max(steps, 1):.2f}"
    names = Counter((name, thread) for _, name, thread, _ in waits)
    for (name, thread), count in names.most_common():
        taken = [took for _, *which, took in waits if which == [name, thread]]
        long = sum(took > LONG for took in taken)
        text = f"  {name}, {thread}: {count / steps:.2f}, longer than {LONG} ms {long / steps:.2f}"
        yield f"{text}, {sum(taken) / steps:.2f} ms a step, at most {max(taken):.2f}"
    long_ones = Counter(step for step, _, thread, took in waits if took > LONG and thread != OTHER)
    several = {step: count for step, count in sorted(long_ones.items()) if count > 1}
    yield f"steps with several waits longer than {LONG} ms of threads that train, and how many: {several or 'none'}"


if __name__ == "__main__":
    main()
