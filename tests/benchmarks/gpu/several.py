"""
Whole runs on several GPUs beside torchtitan's Trainer, with floors: `make bench NAME=several RANKS=2`.

First it prints collectives' bandwidths between the GPUs. Then every row is `drawloom run` with random tokens, and
torchtitan 0.2.2's Trainer, compiled, on the same mesh: tokens per second and GPU by wall time,
medians over the steps after `WARM_UPS`, the plan's prediction, and peak memory. A row's floor is the longer
time: to compute, as one GPU does with the same tokens, or to send its bytes at the measured bandwidth. Losses in the
first steps are compared with one GPU's for the same batches.

Runs take their GPUs in turn, and run side by side where GPUs are free: first all runs on one GPU, then every row's.
torchtitan runs once for rows with other nodes of ours alone, such as CUDA graphs.

With fewer GPUs than ranks, the ranks share them (`device.share`): then rates mean nothing, but losses, launches and the
host's time do. `ONLY="0.6B !reshard"` selects rows by words in their names, and none with the word behind `!`;
`ONLY=a|b` selects rows by either word. `ONLY=--links` prints the bandwidths alone, `--trace` also the GPU's time by
kind and the longest operations of both programs and of one GPU in three steps, `--ours` leaves torchtitan out,
`--rates` also floors and bandwidths, and `--tiny` tries everything with small models on a CPU. `RANKS=2,4` prints the
rows of both.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from threading import Condition
from typing import Any

import attrs
import torch
import torch.distributed as dist

from benchmarks.gpu.breakdown import describe_operations
from benchmarks.gpu.timeline import read

HERE = Path(__file__).parent
TINY, TRACE, RATES = (word in sys.argv for word in ("--tiny", "--trace", "--rates"))
STEPS, WARM_UPS, COMPARED = (6, 2, 4) if TINY else (26, 5, 10)
"""A run's steps, its first steps that are not counted, and its first steps whose losses are compared."""

SMALL: dict[str, Any] = {
    "use": "model.qwen3.dense",
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
}
LARGE: dict[str, Any] = {
    "use": "model.llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14_336,
    "vocab_size": 128_256,
    "rope_theta": 5e5,
}
EXPERTS: dict[str, Any] = {
    "use": "model.qwen3.moe",
    "num_hidden_layers": 12,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 3072,
    "moe_intermediate_size": 384,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "vocab_size": 50_304,
    "rope_theta": 1e6,
}
MODELS = {"Qwen3-0.6B": SMALL, "Llama-3-8B": LARGE, "1B with 64 experts": EXPERTS}
TITAN = {"Qwen3-0.6B": ("qwen3", "0.6B"), "Llama-3-8B": ("llama3", "8B")}
"""Model -> torchtitan's name and flavor."""

DEGREES = {
    "data_replicate": "data_parallel_replicate_degree",
    "data_shard": "data_parallel_shard_degree",
    "tensor": "tensor_parallel_degree",
    "context": "context_parallel_degree",
    "pipeline": "pipeline_parallel_degree",
}
"""Mesh dimension -> torchtitan's key."""

LORA = (
    *('stages.adapters=["@adapters.*"]', 'adapters.lora.use="adapters.lora"', 'adapters.lora.targets=["*_proj"]'),
    *("adapters.lora.rank=16", "adapters.lora.alpha=32.0"),
)
LONG = ('stages.recompute="blocks"', 'offload.use="pipeline.offloaded_inputs"')

OURS_ALONE = ("overlap", "capture", "copies")
"""Nodes without a counterpart in torchtitan; with them a row has the same results."""

SCHEDULES = {"one_f_one_b": "1F1B", "zero_bubble_v": "ZBVZeroBubble"}
WEIGHT_BYTES = 2
LONG_ROW = 2**17
"""Tokens of a row whose step takes a minute, so that it is measured for two steps, and not beside one GPU."""


@attrs.frozen
class Row:
    """A model on a mesh: rows by microbatch and replica, row length, microbatches, and other edits."""

    model: str
    mesh: Mapping[str, int] = attrs.field(factory=dict, hash=False)
    rows: int = 1
    length: int = 4096
    microbatches: int = 1
    edits: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        mesh = " ".join(f"{name}={size}" for name, size in self.mesh.items()) or "one GPU"
        return ", ".join([self.model, f"{self.rows} x {self.length} x {self.microbatches}", mesh, *self.edits])

    @property
    def ranks(self) -> int:
        """The number of ranks; `expert` adds none."""
        sizes = {"expert": 1, **{name: size for name, size in self.mesh.items() if name != "expert"}}
        return int(torch.Size(sizes.values()).numel())

    @property
    def replicas(self) -> int:
        """The number of ranks with their own rows."""
        return self.mesh.get("data_shard", 1) * self.mesh.get("data_replicate", 1)

    @property
    def tokens_per_row(self) -> int:
        return min(self.length, 64) if TINY else self.length

    @property
    def global_rows(self) -> int:
        return self.rows * self.microbatches * self.replicas


def list_rows(ranks: int) -> list[Row]:
    """Return the rows for `ranks` GPUs."""
    small, large, experts = MODELS
    half, symmetric = ranks // 2, ('dispatcher.use="experts.symmetric"',)
    room = (), ("dispatcher.capacity=1.25",), ("dispatcher.capacity=1.25", 'capture.use="pipeline.captured"')
    kept = ("stages.reshard_after_forward=false",)
    captured, copied = ('capture.use="pipeline.captured"',), ('copies.use="overlap.shard_copies"',)
    overlapped = ('overlap.use="overlap.tensor_products"', 'overlap.through="memory"')
    pipelined_in_v = ('schedule.use="pipeline.schedules.zero_bubble_v"',)
    rows = [
        *(
            Row(small, {"data_shard": ranks}, 4, edits=(*often, *edits))
            for often in ((), kept)
            for edits in ((), captured, (*captured, *copied))
        ),
        *(Row(small, {"data_replicate": ranks}, 4, edits=edits) for edits in ((), captured)),
        *(Row(large, {"data_shard": ranks}, 2, edits=edits) for edits in ((), copied, kept, (*kept, *copied))),
        *(Row(large, {"tensor": 2, "data_shard": half}, 4, edits=edits) for edits in ((), overlapped)),
        *(Row(small, {"context": ranks}, 1, 32_768, edits=edits) for edits in ((), captured)),
        *(Row(experts, {"data_shard": ranks, "expert": ranks}, 4, edits=(*kept, *symmetric, *edits)) for edits in room),
        *(
            Row(large, {"data_shard": ranks}, 2, edits=(*edits, *transfers))
            for edits in (('float8.use="float8.training"',), LORA, (*kept, *LORA))
            for transfers in ((), copied)
        ),
        *(
            Row(large, {"context": ranks}, 1, length, edits=edits)
            for length in (LONG_ROW, 2 * LONG_ROW)
            for edits in (LONG, (*LONG, 'attention.use="pipeline.kept_attention"'))
        ),
        Row(large, {"pipeline": 2, "data_shard": half}, 1, microbatches=8, edits=pipelined_in_v),
    ]
    pipelined = {"pipeline": ranks}
    for schedule in ("one_f_one_b", "zero_bubble_v", "auto"):
        edits = (f'schedule.use="pipeline.schedules.{schedule}"',)
        rows.append(Row(large, pipelined, 1, microbatches=4 * ranks, edits=edits))
    rows = rows if half > 1 else [row for row in rows if row.mesh.keys() != {"pipeline", "data_shard"}]
    return [attrs.evolve(row, mesh={name: size for name, size in row.mesh.items() if size > 1}) for row in rows]


def main() -> None:
    """Print bandwidths, then lines by row."""
    if "RANK" in os.environ:
        return measure_links()
    counts = [int(count) for count in os.environ.get("RANKS", "2").split(",")]
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    gpus = torch.cuda.device_count()
    print(f"torch {torch.__version__}, {gpus} GPUs", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        links = Path(folder) / "links.json"
        rates: dict[int, dict[str, float]] = {}
        for count in counts:
            print(f"{count} ranks", flush=True)
            if not RATES:
                _run(torchrun(count, __file__, *sys.argv[1:]), {"LINKS": str(links)})
                rates[count] = json.loads(links.read_text())
        if "--links" in sys.argv:
            return
        rows = [row for count in counts for row in list_rows(count) if all(is_selected(row, word) for word in words)]
        table = Table(rates, Path(folder), Gpus(gpus))
        with ThreadPoolExecutor(max(len(rows), 1)) as executor:
            for row in rows:
                table.start_on_one_gpu(row)
            for row in rows:
                executor.submit(table.print_row, row).add_done_callback(lambda printed: printed.result())
                time.sleep(0.1)  # rows take their GPUs in this order


def is_selected(row: Row, word: str) -> bool:
    return word[1:] not in row.name if word.startswith("!") else any(part in row.name for part in word.split("|"))


class Gpus:
    """The machine's GPUs; runs get theirs in the order in which they ask."""

    def __init__(self, count: int) -> None:
        names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
        self._count, self._free = count, [int(name) for name in names.split(",")] if count else []
        self._waiting, self._changed = deque[object](), Condition()

    @contextmanager
    def take(self, count: int) -> Iterator[dict[str, str]]:
        """Wait for `count` GPUs, or for all if there are fewer, and yield the variables that select them."""
        wanted, place = min(count, self._count), object()
        with self._changed:
            self._waiting.append(place)
            self._changed.wait_for(lambda: self._waiting[0] is place and len(self._free) >= wanted)
            self._waiting.popleft()
            taken = [self._free.pop(0) for _ in range(wanted)]
            self._changed.notify_all()
        try:
            yield {"CUDA_VISIBLE_DEVICES": ",".join(map(str, taken))} if taken else {}
        finally:
            with self._changed:
                self._free = sorted([*self._free, *taken])
                self._changed.notify_all()


def torchrun(ranks: int, *words: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *words]


def _run(command: list[str], variables: Mapping[str, str] = {}, folder: Path | None = None) -> str:
    """Run a command in a folder, show its end if it fails, and return its output."""
    environment = os.environ | {"OMP_NUM_THREADS": "1" if TINY else "4", **variables}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), environment.get("PYTHONPATH", "")])
    if variables.get("LINKS"):
        return str(subprocess.run(command, env=environment, check=True, cwd=folder))
    result = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError((result.stdout + result.stderr)[-1500:])
    return result.stdout


# Bandwidths


def measure_links() -> None:
    """Print each collective's GB/s by size, as bytes a GPU sends over seconds, and write the best by name."""
    from drawloom.components.distributed.device import ComputeDevice
    from drawloom.components.distributed.processes import TorchProcesses

    device = ComputeDevice(kind="cpu" if TINY else "cuda", share=True)
    device.open()
    processes = TorchProcesses(device=device)
    processes.open()
    ranks = processes.world_size
    best: dict[str, float] = {}
    sizes = [2**20] if TINY else [2**20, 2**23, 2**26, 2**28, 2**30]
    for name, collective in collectives(ranks).items():
        texts = []
        for size in sizes:
            whole = torch.empty(size // WEIGHT_BYTES, dtype=torch.bfloat16, device=device.device)
            seconds = _time(collective, whole, device.device)
            rate = size * (ranks - 1) / ranks / seconds
            best[name] = max(best.get(name, 0.0), rate)
            texts.append(f"{size / 2**20:,.0f} MB {rate / 1e9:.1f}")
        if processes.rank == 0:
            print(f"{name:<16}{', '.join(texts)} GB/s", flush=True)
    if processes.rank == 0:
        Path(os.environ["LINKS"]).write_text(json.dumps(best))
    processes.close()


def collectives(ranks: int) -> dict[str, Any]:
    """Return collectives by name; their argument is a tensor that all ranks fill together."""

    def part(whole: torch.Tensor) -> torch.Tensor:
        return whole.new_empty(len(whole) // ranks)

    return {
        "all-gather": lambda whole: dist.all_gather_into_tensor(whole, part(whole)),
        "reduce-scatter": lambda whole: dist.reduce_scatter_tensor(part(whole), whole),
        "all-to-all": lambda whole: dist.all_to_all_single(torch.empty_like(whole), whole),
    }


def _time(collective: Any, whole: torch.Tensor, device: torch.device) -> float:
    """Return a collective's seconds in the fastest batch."""
    from benchmarks.gpu import clock

    calls, times = 2 if TINY else 10, []
    for _ in range(4):
        clock.wait(device)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            collective(whole)
        clock.wait(device)
        times.append((time.perf_counter() - start) / calls)
    return min(times)


# Runs


@attrs.frozen(eq=False)
class Table:
    """Prints rows, from runs on `gpus`, beside floors by `rates`: number of ranks -> collective -> bytes a second."""

    rates: Mapping[int, Mapping[str, float]]
    folder: Path
    gpus: Gpus
    alone: dict[Row, "Future[Result]"] = attrs.field(init=False, factory=dict)
    """The runs on one GPU, which rows share."""
    titan: dict[str, "Future[str]"] = attrs.field(init=False, factory=dict)
    """torchtitan's runs by configuration, which rows share."""
    runs: ThreadPoolExecutor = attrs.field(init=False, factory=lambda: ThreadPoolExecutor(64))

    def start_on_one_gpu(self, row: Row) -> "Future[Result] | None":
        """Start a row's run on one GPU unless another row has; None if it is not wanted, or takes too long."""
        if RATES or row.length >= LONG_ROW:
            return None
        one = attrs.evolve(row, mesh={}, microbatches=row.global_rows // row.rows, edits=_edits_on_one_gpu(row))
        if one not in self.alone:
            self.alone[one] = self.runs.submit(self.run_ours, one, STEPS if TRACE else COMPARED)
        return self.alone[one]

    def print_row(self, row: Row) -> None:
        """Print a row's lines when its runs have ended, or their failure."""
        alone = self.start_on_one_gpu(row)
        tokens = row.global_rows * row.tokens_per_row
        ours = self.runs.submit(self.run_ours, row, STEPS if row.length < LONG_ROW else 2)
        job = json.dumps(titan_job(row)) if has_titan_run(row) else ""
        if job not in self.titan:
            self.titan[job] = self.runs.submit(self.run_titan, job, row.ranks, tokens)
        titan = self.titan[job]
        planned = self.runs.submit(plan, row, self.new_folder(), tokens)
        lines = [row.name]
        try:
            lines += [f"    drawloom    {ours.result().describe(tokens, row.ranks)}"]
            lines += self.describe_floor(row, ours.result(), alone.result()) if alone else []
        except RuntimeError as error:
            lines.append(f"    failed: {str(error).strip().splitlines()[-1]}")
        lines += [f"    plan        {planned.result()}", f"    torchtitan  {titan.result()}"]
        print("\n".join(lines), flush=True)

    def describe_floor(self, row: Row, ours: "Result", alone: "Result") -> Iterator[str]:
        tokens = row.global_rows * row.tokens_per_row
        differences = [abs(a - b) for a, b in zip(ours.losses, alone.losses, strict=False)]
        yield f"    one GPU     {alone.describe(tokens, 1)}; losses differ by {max(differences):.1e}"
        computing = statistics.median(alone.seconds[1:] or alone.seconds) / row.ranks
        sending = sum(count / self.rates[row.ranks][name] for name, count in list_bytes_sent(row).items())
        floor = max(computing, sending)
        parts = f"{computing * 1e3:.1f} ms computing, {sending * 1e3:.1f} ms sending"
        yield f"    floor       {tokens / floor / row.ranks:>9,.0f} tokens/s a GPU, {floor * 1e3:.1f} ms; {parts}"

    def new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.folder))

    def run_ours(self, row: Row, steps: int) -> "Result":
        """Train with drawloom, and read its metrics."""
        folder = self.new_folder()
        with self.gpus.take(row.ranks) as variables:
            _run(torchrun(row.ranks, "-m", "drawloom", "run", *_words(row, folder, steps)), variables, folder)
        run = folder / "runs/several"
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        tokens = [0, *(line["tokens"] for line in lines)]
        counts = [after - before for before, after in pairwise(tokens)]
        seconds = [count / line["tokens_per_second"] for count, line in zip(counts, lines, strict=True)]
        operations = describe_trace(row, run / "traces") if TRACE and steps == STEPS else ""
        return Result(seconds, [line["loss"] for line in lines], max(line["memory"] for line in lines), operations)

    def run_titan(self, job: str, ranks: int, tokens: int) -> str:
        """Train with torchtitan by a configuration, and return its rate, time and memory."""
        if not job:
            return "has no such run"
        if find_spec("torchtitan") is None:
            return "is not installed: pip install --no-deps torchtitan==0.2.2"
        folder = self.new_folder()
        target = folder / "titan.json"
        words = (str(HERE / "titan_trainer.py"), job, str(target))
        try:
            with self.gpus.take(ranks) as variables:
                _run(torchrun(ranks, *words), variables | {"TRACED": "3" if TRACE else "0"}, folder)
        except RuntimeError as error:
            return f"failed: {str(error).strip().splitlines()[-1]}"
        result = json.loads(target.read_text())
        return Result(result["seconds"], [], result["bytes"], result["operations"]).describe(tokens, ranks)


def describe_trace(row: Row, folder: Path) -> str:
    """Return lines about the GPU's operations in a run's traced steps; `OUT`, if set, gets the trace."""
    path = next(folder.glob("*rank-0*"))
    timeline = read(path)
    if not (spans := list(timeline.spans.values())):
        return ""  # on a CPU
    begin, end = min(start for start, _ in spans), max(end for _, end in spans)
    operations = [operation for operation in timeline.operations if begin <= operation.start < end]
    if "OUT" in os.environ:
        name = "".join(letter if letter.isalnum() else "_" for letter in row.name)
        shutil.copy(path, Path(os.environ["OUT"]) / f"{name[:90]}.json.gz")
    return "\n        ".join(["", *describe_operations([(o.name, (o.start, o.end)) for o in operations])])


@attrs.frozen
class Result:
    """A run's seconds by step, losses by step, and peak bytes."""

    seconds: list[float]
    losses: list[float]
    peak: float
    operations: str = ""

    def describe(self, tokens: int, ranks: int) -> str:
        """Return rate, time and memory for `tokens` in a step."""
        seconds = statistics.median(self.seconds[min(WARM_UPS, len(self.seconds) // 2) :])
        rate = tokens / seconds / ranks
        return f"{rate:>9,.0f} tokens/s a GPU, {seconds * 1e3:.1f} ms, {self.peak / 2**30:.1f} GiB{self.operations}"


def _edits_on_one_gpu(row: Row) -> tuple[str, ...]:
    return tuple(
        edit for edit in row.edits if not edit.startswith(("schedule", "dispatcher", "stages.reshard", *OURS_ALONE))
    )


def write_recipe(row: Row, folder: Path, steps: int) -> Path:
    """Write a row's recipe and return its path."""
    model, length = MODELS[row.model], row.tokens_per_row
    if TINY:
        small = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 128, "head_dim": 16}
        model = {**model, **small, "num_attention_heads": 4, "num_key_value_heads": 2}
    tables: dict[str, dict[str, Any]] = {
        "vars": {"length": length},
        "run": {"name": "several"},
        "device": {"share": True},
        "precision": {} if TINY else {"parameter": "bfloat16", "compute": "bfloat16", "gradient": "bfloat16"},
        "tokens": {"use": "random_rows", "vocab_size": model["vocab_size"], "length": length},
        "model": {**model, "max_position_embeddings": length},
        "batch": {"global_size": row.global_rows, "micro_size": row.rows},
        "mesh": dict(row.mesh),
        "checkpoint": {"every": "never"},
        "evaluate": {"every": "never"},
        "optimizer": {"lr": 1e-5},
        "trainer": {"steps": steps, "on_finish": []},
        "report": {"every": 1},
    }
    if TRACE and steps == STEPS:
        tables["listeners.profiler"] = {"use": "listeners.profiler", "wait": STEPS - 6, "warmup": 1, "active": 3}
    lines = ['extends = "pretrain"', 'unset = ["sample", "checkpoint.best"]']
    for table, values in tables.items():
        lines += ["", f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    path = folder / "several.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def _words(row: Row, folder: Path, steps: int) -> list[str]:
    return [str(write_recipe(row, folder, steps)), "--import", str(HERE / "random_rows.py"), *row.edits]


def plan(row: Row, folder: Path, tokens: int) -> str:
    """Return the plan's rate, time and memory."""
    device = ["--device", "cpu" if TINY else "h200", "--ranks", str(row.ranks), "--format", "json"]
    command = [sys.executable, "-m", "drawloom", "plan", *_words(row, folder, STEPS), *device]
    try:
        planned = json.loads(_run(command, folder=folder))
    except RuntimeError as error:
        return str(error).strip().splitlines()[-1]
    return Result([planned["step_seconds"]] * (WARM_UPS + 1), [], max(planned["peak_memory_bytes"])).describe(
        tokens, row.ranks
    )


def has_titan_run(row: Row) -> bool:
    """Whether torchtitan has this model and mesh, and counterparts of the edits that change results."""
    known = ("stages.reshard", *OURS_ALONE, *SCHEDULES)
    edits = all(any(name in edit for name in known) for edit in row.edits)
    return edits and row.model in TITAN and not (TINY or RATES or "--ours" in sys.argv)


def titan_job(row: Row) -> dict[str, Any]:
    """Return torchtitan's configuration for a row."""
    name, flavor = TITAN[row.model]
    kept = any("reshard" in edit for edit in row.edits)
    schedule = next((theirs for ours, theirs in SCHEDULES.items() if ours in row.name), "1F1B")
    parallel: dict[str, Any] = {key: row.mesh.get(dimension, 1) for dimension, key in DEGREES.items()}
    parallel |= {
        "fsdp_reshard_after_forward": "never" if kept else "always",
        "pipeline_parallel_schedule": schedule,
    }
    pipelined = "pipeline" in row.mesh
    local = row.rows * row.microbatches if pipelined else row.rows
    return {
        "model": {"name": name, "flavor": flavor},
        "arguments": {"max_seq_len": row.length},
        "training": {
            "local_batch_size": local,
            "global_batch_size": row.global_rows,
            "seq_len": row.length,
            "steps": STEPS,
            "dtype": "bfloat16",
        },
        "parallelism": parallel,
        "activation_checkpoint": {"mode": "none"},
        # Zero bubble splits backward passes, which its Trainer can't do with compiled blocks.
        "compile": {"enable": schedule == "1F1B"},
        "optimizer": {"lr": 1e-5},
        "metrics": {"log_freq": STEPS},
    }


# Floors


def list_bytes_sent(row: Row) -> dict[str, float]:
    """Return the bytes that a GPU sends in a step, by collective."""
    model, sent = MODELS[row.model], dict.fromkeys(("all-gather", "reduce-scatter", "all-to-all"), 0.0)
    layers, hidden, tokens = model["num_hidden_layers"], model["hidden_size"], row.rows * row.microbatches * row.length
    for dimension, size in row.mesh.items():
        share = (size - 1) / size
        weights = sum(_list_weights(model)) * WEIGHT_BYTES * share
        rows = tokens * hidden * WEIGHT_BYTES * share
        if dimension == "data_shard":
            sent["all-gather"] += weights * (1 if any("reshard" in edit for edit in row.edits) else 2)
            sent["reduce-scatter"] += weights
        elif dimension == "data_replicate":
            sent["all-gather"] += weights
            sent["reduce-scatter"] += weights
        elif dimension == "tensor":  # before and after attention and the network, in both passes
            sent["all-gather"] += 4 * layers * rows
            sent["reduce-scatter"] += 4 * layers * rows
        elif dimension == "context":  # keys and values in both passes, and their gradients
            pair = 2 * model["num_key_value_heads"] * model["head_dim"] / hidden
            sent["all-gather"] += 2 * layers * rows * pair
            sent["reduce-scatter"] += layers * rows * pair
        elif dimension == "expert":  # to the experts and back, in both passes
            sent["all-to-all"] += 4 * layers * rows * model["num_experts_per_tok"]
        else:  # a pipeline's rank sends its microbatches' hidden states once in each pass
            sent["all-to-all"] += 2 * tokens * hidden * WEIGHT_BYTES
    return sent


def _list_weights(model: Mapping[str, Any]) -> Iterator[int]:
    """Yield counts for weights that ranks along `data_shard` share: all but experts, which ranks keep apart."""
    heads, groups = (model[key] * model["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    layer = model["hidden_size"] * (2 * heads + 2 * groups)
    if "num_experts" not in model:
        layer += 3 * model["hidden_size"] * model["intermediate_size"]
    yield layer * model["num_hidden_layers"]
    yield model["hidden_size"] * model["vocab_size"] * (1 if model.get("tie_word_embeddings") else 2)


if __name__ == "__main__":
    main()
