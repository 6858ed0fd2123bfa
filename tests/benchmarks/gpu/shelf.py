"""
Recipes of known models on the available GPUs: `make bench NAME=shelf`.

A byte-pair tokenizer is trained on Python's standard library, and `drawloom tokenize` converts its source to a token
store. Then every recipe that the GPUs can hold trains for some steps with the mesh from MODELS. A line reports the last
step's loss, tokens per second and GPU, MFU, and planned and measured figures.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

GPUS = torch.cuda.device_count()
STEPS = 6
STEPS_ONLY = """
checkpoint.every = "never"
evaluate.every = "never"
trainer.on_finish = []
"""
"""Overlay without checkpoints, which have some 100 GB, and would take longer than the steps."""

MODELS: dict[str, tuple[int, tuple[str, ...]]] = {
    "qwen3_0_6b": (1, ("batch.global_size=16",)),
    "qwen3_8b": (2, ("mesh.data_shard=2", "batch.global_size=8")),
    "llama3_8b": (2, ("mesh.data_shard=2", "batch.global_size=8")),
    "qwen3_30b_a3b": (8, ("mesh.data_shard=8", "mesh.expert=8", "batch.global_size=16")),
}
"""Recipe -> GPUs and settings. The batch size is smaller than the recipe's, so that steps are short."""


def main() -> None:
    """Print a line per recipe that these GPUs can hold."""
    wanted = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        work_folder = Path(folder)
        prepare_data(work_folder)
        for name, (ranks, words) in MODELS.items():
            if ranks <= GPUS and (not wanted or name in wanted):
                print(f"{name:16}{train_recipe(work_folder, name, words, STEPS, ranks, name)}", flush=True)


def prepare_data(folder: Path) -> None:
    """Write a tokenizer and a token store with Python's standard library into a folder."""
    _train_tokenizer(folder / "tokenizer")
    source, tokenizer = str(Path(os.__file__).parent / "*.py"), str(folder / "tokenizer" / "tokenizer.json")
    (folder / "steps_only.toml").write_text(STEPS_ONLY)
    _run_drawloom(folder, "tokenize", source, "--to", "store", "--tokenizer", tokenizer, "--end-token", "<end>")


def _train_tokenizer(folder: Path) -> None:
    """Train a byte-pair tokenizer with 8,192 tokens."""
    folder.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8192, special_tokens=["<end>"], initial_alphabet=alphabet)
    tokenizer.train([str(path) for path in sorted(Path(os.__file__).parent.glob("*.py"))], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def _run_drawloom(folder: Path, *words: str, ranks: int = 1) -> str:
    """Run a command, print its output as it comes, with the seconds since its start, and return the output."""
    starter = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *starter, "-m", "drawloom", *words]
    begin, lines = time.perf_counter(), []
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            print(f"    {time.perf_counter() - begin:5.1f} s  {line.rstrip()}", flush=True)
    return "".join(lines)


def train_recipe(
    folder: Path, name: str, words: Sequence[str], steps: int, ranks: int = 1, run_name: str = "run"
) -> str:
    """Train a recipe on a prepared folder's data, and return loss, speed, and planned and measured figures."""
    run_folder = folder / run_name
    data = ("vars.data=store", "vars.tokenizer=tokenizer", 'tokenizer.end_token="<end>"')
    run = ("--overlay", "steps_only.toml", f"run.folder={run_folder}", f"trainer.steps={steps}")
    output = _run_drawloom(folder, "run", name, *run, *data, *words, ranks=ranks)
    try:
        last = next(row for row in reversed(read_metrics(run_folder)) if "loss" in row)
        speed = f"{last['tokens_per_second'] / ranks:,.0f} tokens/s a GPU, MFU {last.get('mfu', 0):.1%}"
        return f"loss {last['loss']:.3f}, {speed}; {(run_folder / 'plan.txt').read_text().strip()}"
    except (OSError, StopIteration, KeyError) as error:
        return f"{type(error).__name__} {error}: {output.strip()[-600:]}"


def read_metrics(run_folder: Path) -> list[dict[str, float]]:
    """Return a run's rows of metrics."""
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main()
