"""
Training losses in float8 compared with bfloat16, on one GPU in a few minutes: `make bench NAME=matched_loss`.

One recipe, a decoder with 14 million parameters over the bytes in the sources for Python and torch, runs with three
seeds in both formats; runs with one seed have the same initial weights and row order. Every tenth of the steps gets a
line with the mean losses in bfloat16, their spread over the seeds, and float8's difference for each seed. The last line
compares validation losses. After LIMIT seconds the runs are stopped, and their common steps are compared. With the word
`experts` every layer has 16 experts, and a token visits 4.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
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
EXPERTS = (
    *("model.use=model.qwen3.moe", "model.num_experts=16", "model.num_experts_per_tok=4"),
    "model.moe_intermediate_size=384",
)
TINY_SIZES = (
    *("model.num_hidden_layers=1", "model.hidden_size=64", "model.head_dim=16", "model.num_attention_heads=4"),
    *("model.num_key_value_heads=2", "model.intermediate_size=64", "vars.length=32", "validation.rows_used=8"),
)
BFLOAT16 = ("precision.compute=bfloat16", "precision.gradient=float32")
FORMATS = {"bfloat16": (), "float8": ("float8.use=float8.training",)}
SEEDS = range(3)


def main() -> None:
    """Train all runs at the same time, and print the differences of their losses."""
    sources = [Path(os.__file__).parent / "*.py", Path(torch.__file__).parent / "**" / "*.py"]
    corpus = ["corpus.use=data.text_files", f"corpus.paths={json.dumps([str(path) for path in sources[: 2 - TINY]])}"]
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        # A small model leaves the GPU idle most of the time, so that six runs take little longer than one.
        runs = {
            (name, seed): _start(Path(folder), f"{name}-{seed}", [*corpus, *BFLOAT16, *words, f"run.seed={seed}"])
            for seed in SEEDS
            for name, words in FORMATS.items()
        }
        with suppress(subprocess.TimeoutExpired):
            for (name, seed), run in runs.items():
                if run.wait(timeout=max(0.1, LIMIT - (time.monotonic() - begin))):
                    sys.exit(f"{name} failed: {(Path(folder) / 'log').read_text('utf-8')[-2000:]}")
                print(f"{name}, seed {seed}: {time.monotonic() - begin:.0f} s", flush=True)
        for run in runs.values():
            run.kill()
        results = {(name, seed): _losses(Path(folder) / f"runs/{name}-{seed}/metrics.jsonl") for name, seed in runs}
    steps = min(len(losses) for losses, _ in results.values())
    size = max(1, steps // PARTS)
    for start in range(0, steps, size):
        means = {run: statistics.fmean(losses[start : start + size]) for run, (losses, _) in results.items()}
        _print_line(f"steps {start + 1} to {min(start + size, steps)}", means)
    validation = {run: loss for run, (_, loss) in results.items() if loss is not None}
    if len(validation) == len(runs):
        _print_line("validation", validation)


def _start(folder: Path, name: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a run; all runs print into one file."""
    common = (f"run.name={name}", f"trainer.steps={STEPS}", "trainer.on_finish=[]", f"evaluate.every={STEPS}")
    few = ("evaluate.at_start=false", f"checkpoint.every={STEPS}")
    sizes = [*SIZES, *(EXPERTS if "experts" in sys.argv else ()), *(TINY_SIZES if TINY else ())]
    command = [sys.executable, "-m", "drawloom", "run", "first_run", *sizes, *common, *few]
    with (folder / "log").open("a") as log:
        return subprocess.Popen([*command, *words], cwd=folder, stdout=log, stderr=subprocess.STDOUT)


def _losses(file: Path) -> tuple[list[float], float | None]:
    """Return the losses by step, and the last validation loss."""
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]  # the last line of a stopped run may be cut
    validation = [row["validation_loss"] for row in rows if row.get("validation_loss") is not None]
    return [row["loss"] for row in rows if row.get("loss") is not None], validation[-1] if validation else None


def _print_line(title: str, losses: Mapping[tuple[str, int], float]) -> None:
    """Print losses in bfloat16, their spread, and float8's differences, by seed."""
    plain = [losses["bfloat16", seed] for seed in SEEDS]
    differences = [losses["float8", seed] - loss for seed, loss in zip(SEEDS, plain, strict=True)]
    mean = f"bfloat16 {statistics.fmean(plain):.4f}, spread {max(plain) - min(plain):.4f}"
    seeds = ", ".join(f"{difference:+.4f}" for difference in differences)
    print(f"    {title:<20} {mean}; float8 {statistics.fmean(differences):+.4f} ({seeds})", flush=True)


if __name__ == "__main__":
    main()
