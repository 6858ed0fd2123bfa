"""
The recipes of known models on the GPUs at hand: `make bench-shelf-gpu`.

A tokenizer of byte pairs is learned from Python's standard library, whose source `drawloom tokenize` makes a store of;
then each recipe that fits by its plan trains for some steps with the mesh that it is given here. A line says the last
step's loss, tokens per second and GPU, MFU, and what was planned beside what was measured.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

GPUS = torch.cuda.device_count()
STEPS = 6
NO_CHECKPOINT = "edit.trainer.phases.remove=@checkpoint"
"""Writing that of the last step, of some 100 GB, would take longer than the steps."""

MODELS: dict[str, tuple[int, tuple[str, ...]]] = {
    "qwen3_0_6b": (1, ("batch.global_size=16",)),
    "qwen3_8b": (2, ("mesh.data_shard=2", "batch.global_size=8")),
    "llama3_8b": (2, ("mesh.data_shard=2", "batch.global_size=8")),
    "qwen3_30b_a3b": (8, ("mesh.data_shard=8", "mesh.expert=8", "batch.global_size=16")),
}
"""The GPUs that a recipe needs here, and what is set: fewer rows a step than it takes, so that steps are short."""


def main() -> None:
    """Print a line for each recipe that these GPUs can hold."""
    wanted = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        _tokenizer(place / "tokenizer")
        source, tokenizer = str(Path(os.__file__).parent / "*.py"), str(place / "tokenizer" / "tokenizer.json")
        _drawloom(place, "tokenize", source, "--to", "store", "--tokenizer", tokenizer, "--end-token", "<end>")
        for name, (ranks, words) in MODELS.items():
            if ranks <= GPUS and (not wanted or name in wanted):
                print(f"{name:16}{_line(place, name, ranks, words)}", flush=True)


def _tokenizer(folder: Path) -> None:
    """A `tokenizer.json` of 8,192 byte pairs."""
    folder.mkdir()
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8192, special_tokens=["<end>"], initial_alphabet=alphabet)
    made.train([str(path) for path in sorted(Path(os.__file__).parent.glob("*.py"))], trainer)
    made.save(str(folder / "tokenizer.json"))


def _drawloom(place: Path, *words: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    starter = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *starter, "-m", "drawloom", *words]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)


def _line(place: Path, name: str, ranks: int, words: tuple[str, ...]) -> str:
    data = ("vars.data=store", "vars.tokenizer=tokenizer", 'tokenizer.end_token="<end>"', "validation.rows_used=8")
    run = (f"run.folder={place / name}", f"trainer.steps={STEPS}", "trainer.on_finish=[]", NO_CHECKPOINT)
    done = _drawloom(place, "run", name, *data, *words, *run, 'listeners.plan={use="planning.check"}', ranks=ranks)
    try:
        rows = [json.loads(line) for line in (place / name / "metrics.jsonl").read_text().splitlines()]
        last = next(row for row in reversed(rows) if "loss" in row)
        speed = f"{last['tokens_per_second'] / ranks:,.0f} tokens/s a GPU, MFU {last.get('mfu', 0):.1%}"
        return f"loss {last['loss']:.3f}, {speed}; {(place / name / 'plan.txt').read_text().strip()}"
    except (OSError, StopIteration, KeyError) as error:
        return f"{type(error).__name__} {error}: {(done.stderr or done.stdout).strip()[-600:]}"


if __name__ == "__main__":
    main()
