"""
Floors of a run and the settings that `drawloom plan --floor` proposes, on one GPU: `make bench NAME=floor`.

A traced run of Qwen3-0.6B in microbatches of one row comes first, and its floor, with planned and measured seconds by
kind of operation. Then the run is repeated with every proposed setting by itself, and a line has the predicted and the
measured part of the step that it saves. `ONLY=8B` takes a quarter of Llama 3 8B's layers instead, and `ONLY=--tiny`
small sizes on a CPU.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.memory import ONE_GPU, SMALL
from benchmarks.gpu.shelf import prepare_data, read_metrics, train_recipe

TINY = "--tiny" in sys.argv
STEPS = 10
WARM_UP_STEPS = 6  # with the traced ones
CASES = {
    "0.6B": ("qwen3_0_6b", ("batch.global_size=16", "batch.micro_size=1")),
    "8B": ("llama3_8b", (*ONE_GPU, "model.num_hidden_layers=8", "batch.global_size=8")),
}


def main() -> None:
    """Print the floor of the first case that a word names, and the gain of every proposed setting."""
    name, words = next(case for key, case in CASES.items() if key in sys.argv[1:] or len(sys.argv) == 1 + TINY)
    words = (*words, *SMALL) if TINY else words
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        prepare_data(folder)
        before = measure_step(folder, name, words, "plain", "--overlay=with_profiler")
        command = [sys.executable, "-m", "drawloom", "plan", str(folder / "plain"), "--floor"]
        print(subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout, flush=True)
        planned = json.loads(subprocess.run([*command, "--format", "json"], cwd=folder, capture_output=True).stdout)
        for number, gap in enumerate(gap for gap in planned["floor"]["gaps"] if gap["faster"]):
            lines, predicted = gap["faster"]["toml"], gap["faster"]["step_seconds"] / planned["step_seconds"] - 1
            settings = [line.replace(" = ", "=", 1) for line in lines]
            measured = measure_step(folder, name, (*words, *settings), f"changed_{number}") / before - 1
            print(f"{'; '.join(lines)}: {predicted:+.1%} predicted, {measured:+.1%} measured", flush=True)


def measure_step(folder: Path, name: str, words: Sequence[str], run_name: str, *more: str) -> float:
    """Train a recipe, and return the median seconds of its steps after the warm-up."""
    train_recipe(folder, name, ("report.every=1", *words, *more), STEPS, run_name=run_name)
    steps = [row for row in read_metrics(folder / run_name) if row["step"] > WARM_UP_STEPS]
    return statistics.median(row["seconds/step"] - row.get("seconds/excluded", 0.0) for row in steps)


if __name__ == "__main__":
    main()
