"""
Bitwise results of small runs: `python tests/house/baseline.py FILE`, and later `--compare FILE`.

Record before a change that must keep every number (a rename, a move), and compare afterwards. Every optimizer trains a
dense model and one with experts, on one rank and on two; two ranks make a pipeline; runs are resumed. The file records
losses and gradient norms, exported tensors by their Hugging Face names, and the tensors of the last checkpoint without
names, so that state may be renamed. If initial weights differ, `--save-weights FOLDER` exports them, and a later
`--weights FOLDER` starts every run from these exports.
"""

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import load_file
from torch import Tensor

from support.runs import drawloom, rows, take_back, write_corpus

STEPS = 6

MODELS = {
    "dense": 'extends = "./tiny.toml"\n[model]\nnum_hidden_layers = 2\n',
    "experts": """
extends = "./tiny.toml"

[model]
use = "model.qwen3.moe"
num_hidden_layers = 2
hidden_size = 16
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 8
tie_word_embeddings = true
num_experts = 4
num_experts_per_tok = 2
moe_intermediate_size = 16
""",
}

OPTIMIZERS = {
    "adamw": ['optimizer.use="optim.adamw"', "optimizer.lr=4e-3"],
    "sgd": ['optimizer.use="optim.sgd"', "optimizer.lr=0.5"],
    "stochastic_adamw": [
        'optimizer.use="optim.stochastic_adamw"',
        "optimizer.lr=4e-3",
        'precision.parameter="bfloat16"',
    ],
}

COMMON = ["evaluate.every=3", "checkpoint.every=3", "checkpoint.keep=9"]


@attrs.frozen
class Case:
    """A run: model, optimizer, ranks, and further words of its command line."""

    model: str
    optimizer: str
    ranks: int = 1
    words: tuple[str, ...] = ()
    kind: str = "plain"
    layers: int = 2

    @property
    def name(self) -> str:
        """Return a name such as `dense-adamw-2-plain`."""
        return f"{self.model}-{self.optimizer}-{self.ranks}-{self.kind}"

    @property
    def shape(self) -> str:
        """Return the key of the case's initial weights."""
        return f"{self.model}-{self.layers}"


def cases() -> Iterator[Case]:
    """Yield all runs of the baseline."""
    for model in MODELS:
        for optimizer in OPTIMIZERS:
            yield Case(model, optimizer)
            yield Case(model, optimizer, ranks=2, words=("batch.micro_size=2",))
            yield Case(model, optimizer, kind="resumed")
        for schedule in ("one_f_one_b", "zero_bubble_v"):
            words = ("mesh.pipeline=2", "batch.micro_size=1", f"schedule.use=pipeline.schedules.{schedule}")
            yield Case(model, "adamw", 2, (*words, "model.num_hidden_layers=4"), schedule, layers=4)


def record(case: Case, folder: Path, weights: Path | None) -> dict[str, Any]:
    """Run a case, and return its numbers and digests."""
    run = folder / "runs" / case.name
    words = ["run", f"{case.model}.toml", f"run.name={case.name}", f"trainer.steps={STEPS}"]
    words += [*OPTIMIZERS[case.optimizer], *COMMON, *case.words]
    if weights is not None:
        words.append(f"stages.weights={weights / case.shape}")
    for number in range(2 if case.kind == "resumed" else 1):
        if number:
            take_back(run, STEPS // 2)
        for outcome in drawloom(folder, *words, ranks=case.ranks):
            if outcome.code:
                sys.exit(f"drawloom {' '.join(words)}\n{outcome.text}")
    return {
        "numbers": numbers(run),
        "export": export(run / "export"),
        "state": state(run / f"checkpoints/step-{STEPS}"),
    }


def numbers(run: Path) -> list[dict[str, str]]:
    """Return every step's losses and norms to the last digit, under names that outlive renamed metrics."""
    labels = {"loss": "loss", "grad_norm": "norm", "validation_loss": "evaluated", "lr": "rate"}
    return [{label: repr(row[key]) for key, label in labels.items() if key in row} for row in rows(run)]


def export(folder: Path) -> dict[str, str]:
    """Return digests of exported tensors by their Hugging Face names."""
    return {name: digest(tensor) for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def state(checkpoint: Path) -> list[str]:
    """Return sorted digests of a checkpoint's tensors, without names."""
    return sorted(digest(tensor) for path in checkpoint.glob("*.safetensors") for tensor in load_file(path).values())


def digest(tensor: Tensor) -> str:
    """Return the sha256 of dtype, shape and bytes."""
    head = f"{tensor.dtype} {[*tensor.shape]} ".encode()
    return hashlib.sha256(head + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def differences(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """Yield every difference between two baselines."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            key_path = f"{where}/{key}"
            if key not in before or key not in now:
                yield f"{key_path}: {'missing now' if key in before else 'new'}"
            else:
                yield from differences(before[key], now[key], key_path)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from differences(old, new, f"{where}/{index}")
    elif before != now:
        yield f"{where}: {before} before, {now} now"


def main() -> int:
    """Train all cases, and record or compare the results; return 1 if a number, an export or a state differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="the file to write")
    parser.add_argument("--compare", type=Path, help="an earlier file to compare with")
    parser.add_argument("--weights", type=Path, help="exports to start from")
    parser.add_argument("--save-weights", type=Path, help="the folder for exports to start from")
    parser.add_argument("--only", default="", help="a part of the names of the cases to run")
    arguments = parser.parse_args()
    weights, weights_folder = (path and path.resolve() for path in (arguments.weights, arguments.save_weights))
    records = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_corpus(folder)
        for name, text in MODELS.items():
            (folder / f"{name}.toml").write_text(text, "utf-8")
        for case in cases():
            if arguments.only in case.name:
                records[case.name] = record(case, folder, weights)
                if (
                    weights_folder is not None
                    and case.optimizer == "adamw"
                    and not (weights_folder / case.shape).exists()
                ):
                    shutil.copytree(folder / "runs" / case.name / "export", weights_folder / case.shape)
    if arguments.file is not None:
        arguments.file.write_text(json.dumps(records, indent=1), "utf-8")
    if arguments.compare is None:
        return 0
    before = json.loads(arguments.compare.read_text("utf-8"))
    differing = list(differences({name: case for name, case in before.items() if arguments.only in name}, records))
    print("\n".join(differing) or f"{len(records)} runs: all numbers, exports and states equal {arguments.compare}")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
