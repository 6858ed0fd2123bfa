"""
The loss of training in float8 beside bfloat16, on one GPU in ten minutes: `make bench-loss-gpu`.

One recipe, a decoder of 26 million parameters over the bytes of the source of Python's standard library and of torch,
runs with three seeds in bfloat16, and with the first seed in float8: initial weights and the order of rows are those of
the first run. For each tenth of the steps a line has the mean loss of the first run, the mean difference of float8 to
it, and those of the other seeds. The last line compares the validation losses.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

TINY = "--tiny" in sys.argv
STEPS = int(os.environ.get("STEPS", "20" if TINY else "3000"))
PARTS = 10
SIZES = (
    *("model.num_hidden_layers=8", "model.hidden_size=512", "model.num_attention_heads=8"),
    *("model.num_key_value_heads=4", "model.head_dim=64", "model.intermediate_size=1536"),
    *("vars.length=1024", "batch.global_size=16", "batch.micro_size=16", "optimizer.lr=1e-3"),
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
    """Train the runs one after another, and print the differences of their losses."""
    sources = [Path(os.__file__).parent / "*.py", Path(torch.__file__).parent / "**" / "*.py"]
    corpus = ["corpus.use=data.text_files", f"corpus.paths={json.dumps([str(path) for path in sources[: 2 - TINY]])}"]
    losses: dict[str, list[float]] = {}
    validation: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, words) in enumerate(RUNS.items()):
            begin = time.monotonic()
            _train(Path(folder), f"run{number}", [*corpus, *words])
            losses[name], validation[name] = _losses(Path(folder) / f"runs/run{number}/metrics.jsonl")
            seconds = time.monotonic() - begin
            print(f"{name:<20}{STEPS} steps in {seconds:.0f} s, validation loss {validation[name]:.4f}", flush=True)
            if number == 1:
                _print_differences(losses)
    _print_differences(losses)
    seeds = [loss for name, loss in validation.items() if name != "float8"]
    difference, spread = validation["float8"] - validation["bfloat16"], max(seeds) - min(seeds)
    print(f"validation loss: float8 {difference:+.4f}, spread of the seeds in bfloat16 {spread:.4f}", flush=True)


def _train(folder: Path, name: str, words: Sequence[str]) -> None:
    common = (f"run.name={name}", f"trainer.steps={STEPS}", "trainer.on_finish=[]", f"evaluate.every={STEPS}")
    command = [sys.executable, "-m", "drawloom", "run", "first_run", *(TINY_SIZES if TINY else SIZES), *common, *words]
    done = subprocess.run(
        [*command, f"checkpoint.every={STEPS}"], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-2000:])


def _losses(file: Path) -> tuple[list[float], float]:
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    losses = [row["loss"] for row in rows if row.get("loss") is not None]
    return losses, [row["validation_loss"] for row in rows if row.get("validation_loss") is not None][-1]


def _print_differences(losses: dict[str, list[float]]) -> None:
    """Print the differences to the first run by tenth of the steps."""
    first, *others = losses
    size = STEPS // PARTS
    for part in range(PARTS):
        means = {name: statistics.fmean(values[part * size : (part + 1) * size]) for name, values in losses.items()}
        differences = [f"{name} {means[name] - means[first]:+.4f}" for name in others]
        steps = f"{part * size + 1} to {(part + 1) * size}"
        print(f"    steps {steps:<14} {first} {means[first]:.4f}, {', '.join(differences)}", flush=True)


if __name__ == "__main__":
    main()
