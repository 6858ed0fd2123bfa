"""Runs whose first steps are smaller than the others."""

from itertools import pairwise
from pathlib import Path

import pytest

from drawloom.components.checkpoint.reader import load_node_state
from drawloom.components.checkpoint.state_hashes import hash_states
from support.runs import drawloom, rows, series, take_back, write_corpus

RAMP = "batch.ramp=[{size=2,until_step=2},{size=6,until_tokens=500}]"
COMMON = (
    *(
        "run",
        "tiny.toml",
        "model.num_hidden_layers=2",
        "batch.global_size=8",
        "batch.micro_size=1",
        "batch.rows=@packing",
        RAMP,
    ),
    *("trainer.steps=8", "trainer.on_finish=[]", "checkpoint.every=2", "checkpoint.keep=9"),
    *("lr.use=learning_rate.wsd", "lr.start=0.0", "lr.batching=@batch", "lr.rows=@packing"),
    *("lr.warmup_tokens=400", "lr.decay_tokens=600"),
)
LEARNED = ("loss", "grad_norm", "lr", "validation_loss", "tokens")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a corpus, the tiny recipe, and its run on one process."""
    folder = tmp_path_factory.mktemp("ramp")
    write_corpus(folder)
    [outcome] = drawloom(folder, *COMMON, "run.name=straight")
    assert outcome.code == 0, outcome.text
    return folder


def test_a_run_resumes_bit_exactly_in_the_middle_of_a_ramp(folder: Path) -> None:
    """A run resumed between two batch sizes has the rows, learning rates and weights of the uninterrupted run."""
    straight, resumed = folder / "runs/straight", folder / "runs/resumed"
    seen = [0, *(row["tokens"] for row in rows(straight))]
    sizes = [-(-(after - before) // 32) for before, after in pairwise(seen)]
    assert sizes == [2, 2, 6, 6, 8, 8, 8, 8]
    drawloom(folder, *COMMON, "run.name=resumed")
    take_back(resumed, 2)
    [outcome] = drawloom(folder, *COMMON, "run.name=resumed")
    assert outcome.code == 0 and "step 3/8" in outcome.text, outcome.text
    assert series(resumed, *LEARNED) == series(straight, *LEARNED)
    for node in ("stages", "optimizer"):
        ours, theirs = (hash_states(load_node_state(run / "checkpoints/step-8", node)) for run in (straight, resumed))
        assert ours == theirs and len(ours) > 10


@pytest.mark.parametrize("layout", ["data_replicate", "pipeline"])
def test_two_processes_have_the_losses_of_one_over_a_ramp(folder: Path, layout: str) -> None:
    """Replicas that divide rows, and pipelines with a program per microbatch count, have one process's losses."""
    outcomes = drawloom(folder, *COMMON, f"run.name={layout}", f"mesh.{layout}=2", ranks=2)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes[0].text
    ours, theirs = (series(folder / "runs" / name, *LEARNED) for name in ("straight", layout))
    for our_values, their_values in zip(ours, theirs, strict=True):
        assert [value or 0 for value in our_values] == pytest.approx([value or 0 for value in their_values], rel=1e-6)
