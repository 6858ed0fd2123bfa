"""
Plans of recipes that use host memory or quantized weights, compared with runs on one GPU: `make bench NAME=memory`.

Each case is a short run of a shipped recipe at its real widths, from random weights, on packed source code. Its output
is printed as it comes. Then follow the last step's loss, tokens per second and MFU, planned and measured peak memory,
planned and measured seconds of a step; for every step its seconds by phase; and for a traced step the GPU's computing
and idle time by phase, the copies to and from host memory, which may overlap with computation, and the longest
operations. Words on the command line choose the cases whose names have them; `--tiny` runs all cases with small sizes
on a CPU.
"""

import gzip
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from benchmarks.gpu.breakdown import kind_of
from benchmarks.gpu.shelf import prepare_data, read_metrics, train_recipe
from benchmarks.gpu.timeline import union

TINY = "--tiny" in sys.argv
STEPS = 2 if TINY else 7
TRACE = ('listeners.profiler={use="listeners.profiler",wait=4,warmup=1,active=1,repeat=1}', "report.every=1")
"""Steps 5 and 6 are traced; a comparison of medians over steps 3 to 7 is not disturbed."""

PHASES = ("forward_backward", "clip", "optimizer")
"""Phases with much work on the GPU."""

LIMITS = ("memory.limit=78.1e9", "memory.host_limit=115e9")
"""The default limits for a GPU of 80 GB and a host of 128 GiB, also where the machine has more."""

ONE_GPU = ("mesh.data_shard=1", "stages.sync_each_microbatch=false", "vars.length=4096")

WITHOUT_MASTERS = (
    *("precision.parameter=bfloat16", "precision.gradient=bfloat16", "precision.uncast=[]"),
    *("optimizer.use=optim.stochastic_adamw", "optimizer.lr=3e-4"),
)

QLORA = (
    'adapters.lora={use="adapters.lora",targets=["*_proj"],rank=16,alpha=32.0}',
    'stages.adapters=["@adapters.*"]',
    "quantized.use=frozen_weights.quantized",
)

STREAMED = ("streamed.use=frozen_weights.streamed",)

OFFLOADED = (
    *("schedule.use=pipeline.schedules.interleaved_1f1b", "schedule.stages_per_rank=8"),
    *("offload.use=pipeline.offloaded", "model.num_hidden_layers=16"),
)


@attrs.frozen
class Case:
    """A recipe and its settings."""

    recipe: str
    settings: tuple[str, ...]


CASES = {
    "8B, float32 states on the host": Case("llama3_8b_one_gpu", (*LIMITS, "batch.global_size=8")),
    "8B, 8-bit states": Case(
        "llama3_8b_one_gpu",
        (*LIMITS, "batch.global_size=4", "optimizer.split_master_weights=false", 'optimizer.state_dtype="uint8"'),
    ),
    "8B, 16 layers, activations on the host": Case(
        "llama3_8b", (*ONE_GPU, *WITHOUT_MASTERS, *OFFLOADED, "batch.global_size=4")
    ),
    "8B, LoRA on NF4": Case("llama3_8b", (*ONE_GPU, *QLORA, "batch.global_size=4", "batch.micro_size=2")),
    "8B, LoRA on NF4 in host memory": Case(
        "llama3_8b", (*ONE_GPU, *QLORA, *STREAMED, "batch.global_size=4", "batch.micro_size=2")
    ),
    "8B, LoRA on bfloat16": Case(
        "llama3_8b", (*ONE_GPU, *QLORA[:2], "stages.recompute=blocks", "batch.global_size=4", "batch.micro_size=2")
    ),
    "8B, LoRA on bfloat16 in host memory": Case(
        "llama3_8b",
        (*ONE_GPU, *QLORA[:2], *STREAMED, "stages.recompute=blocks", "batch.global_size=4", "batch.micro_size=2"),
    ),
    **{
        f"8B, 16 layers, recompute = {policy}": Case(
            "llama3_8b",
            (
                *(*ONE_GPU, *WITHOUT_MASTERS, "model.num_hidden_layers=16", "batch.global_size=4"),
                f"stages.recompute={policy}",
            ),
        )
        for policy in ("selective", "quantized")
    },
    "14B, bfloat16 states on the host": Case("qwen2_5_14b_one_gpu", (*LIMITS, "batch.global_size=4")),
    **{
        f"14B, float8, 8-bit states, {rows} rows": Case(
            "qwen2_5_14b_one_gpu",
            (
                *("float8.use=float8.training", 'optimizer.state_dtype="uint8"'),
                *(f"batch.global_size={rows}", "batch.micro_size=2"),
            ),
        )
        for rows in (2, 8, 32)
    },
    "30B-A3B, LoRA on NF4": Case("qwen3_30b_a3b_lora", ("batch.global_size=4",)),
}

SMALL = (
    *("model.num_hidden_layers=8", "model.hidden_size=64", "model.num_attention_heads=4", "device.kind=cpu"),
    *("model.num_key_value_heads=2", "model.head_dim=16", "model.intermediate_size=128", "vars.length=64"),
    "model.vocab_size=8192",
)


def main() -> None:
    """Print lines for every case."""
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    with tempfile.TemporaryDirectory() as folder:
        prepare_data(Path(folder))
        for number, (name, case) in enumerate(CASES.items()):
            if not words or any(word in name for word in words):
                begin, run = time.perf_counter(), f"run_{number}"
                settings = (*case.settings, *SMALL) if TINY else (*case.settings, *TRACE)
                line = train_recipe(Path(folder), case.recipe, settings, STEPS, run_name=run)
                print(f"{name:<42}{line}; {time.perf_counter() - begin:.0f} s in all", flush=True)
                for detail in (*describe_steps(Path(folder) / run), *describe_trace(Path(folder) / run)):
                    print(f"    {detail}", flush=True)


def describe_steps(run_folder: Path) -> Iterator[str]:
    """Yield a line per step with its seconds by phase, on a GPU by its own clock."""
    for row in read_metrics(run_folder) if (run_folder / "metrics.jsonl").is_file() else ():
        parts = {name.removeprefix("seconds/"): row[name] for name in row if name.startswith("seconds/")}
        if parts:
            text = ", ".join(f"{name} {seconds:.3f}" for name, seconds in parts.items() if seconds >= 0.0005)
            yield f"step {row['step']:.0f}: {sum(parts.values()):.3f} s: {text}"


def describe_trace(run_folder: Path) -> Iterator[str]:
    """Yield lines for each phase in a traced step: computing, idle and copying milliseconds, and long operations."""
    for path in run_folder.glob("traces/*.json.gz"):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
        streams = Counter(event["tid"] for event in events if event.get("cat") == "kernel")
        for phase in events:
            is_shown = phase.get("cat") == "gpu_user_annotation" and phase["name"] in PHASES
            if is_shown and phase["tid"] == streams.most_common(1)[0][0]:
                yield from _describe_phase(phase, events)


def _describe_phase(phase: dict[str, Any], events: list[dict[str, Any]]) -> Iterator[str]:
    """Yield lines for a phase's span on the GPU."""
    start, end = phase["ts"], phase["ts"] + phase["dur"]
    inside = [event for event in events if start <= event["ts"] < end]
    kernels = [event for event in inside if event.get("cat") in ("kernel", "gpu_memset")]
    copies = Counter[str]()
    for event in inside:
        if event.get("cat") == "gpu_memcpy":
            copies[event["name"]] += event["dur"] / 1e3
    kinds, names = Counter[str](), Counter[str]()
    for event in kernels:
        kinds[kind_of(event["name"])] += event["dur"] / 1e3
        names[event["name"][:60]] += event["dur"] / 1e3
    spans = [(event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3) for event in kernels]
    computing = sum(last - first for first, last in union(spans))
    idle = phase["dur"] / 1e3 - computing
    yield f"{phase['name']}: computing {computing:.1f} ms, idle {idle:.1f}; {len(kernels):,} kernels; {_list_ms(kinds)}"
    if copies:
        yield f"    copies: {_list_ms(copies)}"
    yield f"    longest: {_list_ms(names, 16)}"


def _list_ms(counts: Counter[str], most: int = 12) -> str:
    return ", ".join(f"{name} {ms:.1f}" for name, ms in counts.most_common(most))


if __name__ == "__main__":
    main()
