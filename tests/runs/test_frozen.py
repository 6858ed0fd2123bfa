"""Pipelines with one rank that has no trainable parameters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from drawloom.components.parallel.data_parallel import DataParallel
from support.mutations import put
from support.processes import run_ranks
from support.runs import Outcome, command, series, take_back, write_corpus

COMMON = (
    "run",
    "tiny.toml",
    "model.num_hidden_layers=2",
    "model.tie_word_embeddings=false",
    "trainer.steps=6",
    "checkpoint.every=3",
)
TWO = (*COMMON, "checkpoint.keep=9", "trainer.on_finish=[]", "mesh.pipeline=2", "batch.micro_size=1")
LEARNED = ("step", "loss", "grad_norm", "lr", "tokens", "validation_loss")


def _run_frozen(folder: Path, arguments: Sequence[str], frozen: int) -> Outcome:
    """Run on one rank, with all parameters of pipeline rank `frozen` frozen."""
    store = DataParallel.create_store

    def freeze(data_parallel: DataParallel, modules: Sequence[nn.Module], sharded: Sequence[Any]) -> Any:
        for module in modules if data_parallel.mesh.indices.pipeline == frozen else ():
            module.requires_grad_(False)
        return store(data_parallel, modules, sharded)

    put(DataParallel, "create_store", freeze)
    return command(folder, arguments, None)


def _read_checkpoint(run: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((run / "checkpoints/step-6").glob("rank-*"))]


@pytest.mark.parametrize(("frozen", "optimizer"), [(0, "optim.adamw"), (1, "optim.sgd")])
def test_a_rank_without_trainable_parameters_trains_and_resumes(tmp_path: Path, frozen: int, optimizer: str) -> None:
    """The other rank trains, and a resumed run ends with the bits of an uninterrupted run."""
    write_corpus(tmp_path)
    words = (*TWO, f"optimizer.use={optimizer}", "optimizer.lr=0.01")
    for name in ("straight", "resumed"):
        outcomes = run_ranks(_run_frozen, 2, tmp_path, (*words, f"run.name={name}"), frozen)
        assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    take_back(tmp_path / "runs/resumed", 3)
    outcomes = run_ranks(_run_frozen, 2, tmp_path, (*words, "run.name=resumed"), frozen)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert series(tmp_path / "runs/resumed", *LEARNED) == series(tmp_path / "runs/straight", *LEARNED)
    assert len({loss for (loss,) in series(tmp_path / "runs/straight", "loss")}) == 6
    assert _read_checkpoint(tmp_path / "runs/resumed") == _read_checkpoint(tmp_path / "runs/straight") != []
