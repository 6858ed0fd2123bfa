"""
A token of our own sampler by GPU operation, on one GPU: `make bench NAME=decode`.

128 rows of Qwen3-0.6B's shape with random weights in bfloat16, prompts of 64 tokens, 128 new tokens, CUDA graphs; once
with the kernels of `kernels.auto`, and once exact, with `kernels.batch_invariant`. A case prints

- the milliseconds of a token: all of `sample` over its tokens, and the median step, from one wait for ids to the next.
  The difference is the prompt's pass, the first token's pass without a graph, and the recording;
- the time that the GPU needs to read the weights and the cached keys and values once, at the measured bandwidth;
- of TRACED steps in the middle, per step: the time in which the GPU computes, the time in which it waits for the host
  (tracing makes it longer: the median step less the computing time is closer), the launches, the longest gaps, and a
  line for each kernel with its launches and milliseconds, over all layers.

Sizes can be set: ONLY="tokens=512 exact" is the exact case with 512 tokens; ONLY=--tiny is for a CPU.
"""

import gc
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import clock, grpo, training
from benchmarks.gpu.timeline import Interval, iterate_gpu_operations, union
from drawloom.components.rollouts.stages import StageRollouts
from drawloom.ports import Prompts

FIRST = 4
"""First step in the median, behind the recording of the graph."""

TRACED = 4
GAPS = 5
"""Gaps with a line: every step repeats them, so the sorted gaps are read in strides of TRACED."""
LINES = 40
"""Most kernels with a line."""

CASES: dict[str, dict[str, Any]] = {"auto": grpo.GRAPHS, "exact": grpo.INVARIANT | grpo.GRAPHS}


class StepClock:
    """Replacement for `StageRollouts._wait_for_draw` with the times of its calls, and a trace of some of them."""

    def __init__(self, first_traced: int | None) -> None:
        self.wait = StageRollouts._wait_for_draw
        self.first_traced = first_traced
        self.starts: list[float] = []
        self.profile: Any = None

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self.first_traced is not None and grpo.DEVICE == "cuda":
            if len(self.starts) == self.first_traced:
                torch.cuda.synchronize()
                self.profile = profile(activities=[ProfilerActivity.CUDA], acc_events=True)
                self.profile.__enter__()
            if len(self.starts) == self.first_traced + TRACED:
                torch.cuda.synchronize()
                self.profile.__exit__(None, None, None)
        self.starts.append(time.perf_counter())
        return self.wait(*arguments, **options)

    def patch(self) -> Any:
        """Return a context with this clock in the sampler."""
        return mock.patch.object(StageRollouts, "_wait_for_draw", lambda *args, **options: self(*args, **options))

    def list_operations(self) -> list[tuple[str, Interval]]:
        """Return the name and the interval in ms of every GPU operation that was traced."""
        return [] if self.profile is None else [*iterate_gpu_operations(self.profile)]


def main() -> None:
    """Print the cases that a word names, or all."""
    grpo.NEW = int(grpo.NUMBERS.get("tokens", 12 if grpo.TINY else 128))
    prompts = make_prompts()
    names = [name for name in CASES if name in sys.argv[1:]] or [*CASES]
    rate = clock.copy_rate(2**28) if grpo.DEVICE == "cuda" else 1e10
    print(
        torch.__version__, torch.cuda.get_device_name() if grpo.DEVICE == "cuda" else "CPU", f"{rate / 1e12:.2f} TB/s"
    )
    with tempfile.TemporaryDirectory(prefix="decode-") as path:
        grpo.write_model(Path(path) / "model")
        for name in names:
            measure_case(Path(path), name, prompts, rate)
            gc.collect()
            if grpo.DEVICE == "cuda":
                torch.cuda.empty_cache()


def make_prompts() -> Prompts:
    """Return a prompt for every row, all of the same length."""
    rows = grpo.PROMPTS * grpo.GROUP
    tokens = torch.arange(rows * grpo.PROMPT_LENGTH).view(rows, -1) % 50 + 2
    return Prompts(tokens, torch.full((rows,), grpo.PROMPT_LENGTH), torch.arange(rows))


def measure_case(folder: Path, name: str, prompts: Prompts, rate: float) -> None:
    """Sample to compile kernels, then for the time, then with a trace; print the lines of a case."""
    with grpo.load_recipe(folder, folder / f"run-{name}", CASES[name]).open() as run:
        sampler = run.get(StageRollouts)
        sampler.update_weights("train", 1)
        sampler.sample([prompts], "train", 1)
        clocks = [StepClock(None), StepClock(grpo.NEW // 2)]
        seconds = []
        for number, steps in enumerate(clocks, 2):
            began = grpo.now()
            with steps.patch():
                sampler.sample([prompts], "train", number)
            seconds.append(grpo.now() - began)
    starts, tokens = clocks[0].starts, grpo.NEW
    milliseconds = [(after - before) * 1e3 for before, after in pairwise(starts[FIRST:])]
    size = count_bytes(len(prompts.keys), grpo.PROMPT_LENGTH + tokens // 2)
    step, whole = statistics.median(milliseconds), seconds[0] * 1e3 / tokens
    print(
        f"{name}: {whole:.2f} ms a token in all, {step:.2f} ms the median step; "
        f"{len(prompts.keys) * tokens / seconds[0]:,.0f} tokens/s; weights and cache {size / 1e9:.2f} GB, "
        f"{size / rate * 1e3:.2f} ms",
        flush=True,
    )
    print_operations(clocks[1].list_operations())


def count_bytes(rows: int, length: int) -> int:
    """Return the bytes of the weights that a step multiplies, and of the keys and values of `length` tokens."""
    shape: dict[str, int] = training.DENSE | (training.SMALL if grpo.TINY else {})
    hidden, unit, kv_heads = shape["hidden_size"], shape["head_dim"], shape["num_key_value_heads"]
    layer = 2 * hidden * unit * (shape["num_attention_heads"] + kv_heads) + 3 * hidden * shape["intermediate_size"]
    cached = 2 * kv_heads * unit * rows * length
    return 2 * (shape["num_hidden_layers"] * (layer + cached) + hidden * shape["vocab_size"])


def print_operations(operations: list[tuple[str, Interval]]) -> None:
    """Print the computing and the idle time of a traced step, and its kernels, the longest first."""
    if not operations:
        return
    busy = list(union([span for _, span in operations]))
    computing, whole = sum(end - start for start, end in busy) / TRACED, (busy[-1][1] - busy[0][0]) / TRACED
    print(f"    computing {computing:.3f} ms, idle {whole - computing:.3f}, {len(operations) / TRACED:.0f} launches")
    starts = sorted(operations, key=lambda operation: operation[1])
    gaps = sorted(((b[1][0] - a[1][1], a[0], b[0]) for a, b in pairwise(starts)), reverse=True)
    for gap, before, after in gaps[: GAPS * TRACED : TRACED]:
        print(f"    idle {gap:.3f} ms after {before[:50]}, before {after[:50]}")
    counts, sums = Counter[str](), defaultdict[str, float](float)
    for name, (start, end) in operations:
        counts[name] += 1
        sums[name] += (end - start) / TRACED
    for name, total in sorted(sums.items(), key=lambda item: -item[1])[:LINES]:
        print(f"    {total:8.3f} ms {counts[name] / TRACED:6.0f} x {name[:120]}", flush=True)


if __name__ == "__main__":
    main()
