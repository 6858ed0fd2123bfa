"""
Training losses in float8 compared with bfloat16, on one GPU in a few minutes: `make bench-loss-gpu`.

One recipe, a decoder with 14 million parameters over the bytes in the sources for Python and torch, runs with three
seeds in bfloat16, and in float8 with the first run's seed, initial weights and row order. Every tenth of the steps gets
a line with the first run's mean loss and the mean differences of float8 and of the other seeds. The last line compares
validation losses. After LIMIT seconds the runs are stopped, and their common steps are compared.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

TINY = "--tiny" in sys.argv
STEPS = int(os.environ.get("STEPS", "20" if TINY else "3000"))
LIMIT = float(os.environ.get("LIMIT", "600"))
PARTS = 10
SIZES = (
    *("model.num_hidden_layers=4", "model.hidden_size=512", "model.num_attention_heads=8"),
    *("model.num_key_value_heads=4", "model.head_dim=64", "model.intermediate_size=1536"),
    *("vars.length=512", "batch.global_size=32", "batch.micro_size=32", "optimizer.lr=1e-3"),
    "validation.rows_used=512",
)
TINY_SIZES = ("model.num_hidden_layers=1", "model.intermediate_size=64", "vars.length=32", "validation.rows_used=8")
BFLOAT16 = ("precision.compute=bfloat16", "precision.gradient=float32")
RUNS = {
    "bfloat16": BFLOAT16,
    "float8": (*BFLOAT16, "precision.linear=float8"),
    "bfloat16, seed 1": (*BFLOAT16, "run.seed=1"),
    "bfloat16, seed 2": (*BFLOAT16, "run.seed=2"),
}


def main() -> None:
    """Train all runs at the same time, and print the differences of their losses."""
    sources = [Path(os.__file__).parent / "*.py", Path(torch.__file__).parent / "**" / "*.py"]
    corpus = ["corpus.use=data.text_files", f"corpus.paths={json.dumps([str(path) for path in sources[: 2 - TINY]])}"]
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        # A small model leaves the GPU idle most of the time, so that four runs take little longer than one.
        runs = {
            name: _start(Path(folder), f"run{number}", [*corpus, *words])
            for number, (name, words) in enumerate(RUNS.items())
        }
        with suppress(subprocess.TimeoutExpired):
            for name, run in runs.items():
                if run.wait(timeout=max(0.1, LIMIT - (time.monotonic() - begin))):
                    sys.exit(f"{name} failed: {(Path(folder) / 'log').read_text('utf-8')[-2000:]}")
                print(f"{name:<20}{time.monotonic() - begin:.0f} s", flush=True)
        for run in runs.values():
            run.kill()
        files = [Path(folder) / f"runs/run{number}/metrics.jsonl" for number in range(len(runs))]
        both = {name: _losses(file) for name, file in zip(runs, files, strict=True)}
    _print_differences({name: losses for name, (losses, _) in both.items()})
    validation = {name: loss for name, (_, loss) in both.items() if loss is not None}
    seeds = [loss for name, loss in validation.items() if name != "float8"]
    if len(validation) == len(runs):
        difference, spread = validation["float8"] - validation["bfloat16"], max(seeds) - min(seeds)
        losses = ", ".join(f"{name} {loss:.4f}" for name, loss in validation.items())
        print(f"validation loss: {losses}; float8 {difference:+.4f}, spread of the seeds {spread:.4f}", flush=True)


def _start(folder: Path, name: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a run; all runs print into one file."""
    common = (f"run.name={name}", f"trainer.steps={STEPS}", "trainer.on_finish=[]", f"evaluate.every={STEPS}")
    few = ("evaluate.at_start=false", f"checkpoint.every={STEPS}")
    command = [sys.executable, "-m", "drawloom", "run", "first_run", *(TINY_SIZES if TINY else SIZES), *common, *few]
    with (folder / "log").open("a") as log:
        return subprocess.Popen([*command, *words], cwd=folder, stdout=log, stderr=subprocess.STDOUT)


def _losses(file: Path) -> tuple[list[float], float | None]:
    """Return the losses by step, and the last validation loss."""
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]  # the last line of a stopped run may be cut
    validation = [row["validation_loss"] for row in rows if row.get("validation_loss") is not None]
    return [row["loss"] for row in rows if row.get("loss") is not None], validation[-1] if validation else None


def _print_differences(losses: dict[str, list[float]]) -> None:
    """Print the differences to the first run by tenth of the steps that all runs have taken."""
    first, *others = losses
    steps = min(map(len, losses.values()))
    size = max(1, steps // PARTS)
    for start in range(0, steps, size):
        means = {name: statistics.fmean(values[start : start + size]) for name, values in losses.items()}
        differences = [f"{name} {means[name] - means[first]:+.4f}" for name in others]
        span = f"{start + 1} to {min(start + size, steps)}"
        print(f"    steps {span:<14} {first} {means[first]:.4f}, {', '.join(differences)}", flush=True)


if __name__ == "__main__":
    main()
