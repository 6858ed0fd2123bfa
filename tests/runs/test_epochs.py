"""Runs whose length, evaluations and checkpoints are in epochs."""

from pathlib import Path

import pytest

from drawloom.components.checkpoint.commit import list_checkpoints, step_of_checkpoint
from drawloom.components.checkpoint.reader import load_node_state
from drawloom.components.checkpoint.state_hashes import hash_states
from support.runs import drawloom, rows, series, take_back, write_corpus

WORDS = (
    *("run", "tiny.toml", "trainer.epochs=2", "trainer.on_finish=[]", "batch.global_size=10", "batch.micro_size=5"),
    *("evaluate.every={epochs=0.5}", "checkpoint.every=epoch", "checkpoint.keep=9"),
)
"""The corpus has 56 rows, so that 2 epochs take 112, and both end within a step of 10."""


def list_saved_steps(run: Path) -> list[int]:
    return [step_of_checkpoint(path) for path in list_checkpoints(run / "checkpoints")]


def list_evaluated_steps(run: Path) -> list[int]:
    return [row["step"] for row in rows(run) if row.get("validation_loss") is not None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a corpus, the tiny recipe, and its run of two epochs in one process."""
    folder = tmp_path_factory.mktemp("epochs")
    write_corpus(folder)
    [outcome] = drawloom(folder, *WORDS, "run.name=straight")
    assert outcome.code == 0 and "56 rows and 6 steps in an epoch" in outcome.text, outcome.text
    assert "length  12 steps, 2.1429 epochs" in outcome.text
    return folder


def test_every_epoch_ends_within_the_step_with_its_last_row(folder: Path) -> None:
    """The steps with rows 28, 56, 84 and 112 evaluate, and the steps with rows 56 and 112 save."""
    run = folder / "runs/straight"
    assert len(rows(run)) == 12
    assert list_evaluated_steps(run) == [3, 6, 9, 12] and list_saved_steps(run) == [6, 12]


def test_a_run_resumed_in_its_second_epoch_has_the_bits_of_an_unbroken_run(folder: Path) -> None:
    """Interrupted after step 8 and again repeated from the first epoch's checkpoint, it ends with equal weights."""
    straight, resumed = folder / "runs/straight", folder / "runs/resumed"
    drawloom(folder, *WORDS, "run.name=resumed")
    take_back(resumed, 6)
    [outcome] = drawloom(folder, *WORDS, "run.name=resumed")
    assert "step 7/12" in outcome.text, outcome.text
    assert series(resumed, "loss", "lr", "validation_loss") == series(straight, "loss", "lr", "validation_loss")
    states = [hash_states(load_node_state(run / "checkpoints/step-12", "stages")) for run in (straight, resumed)]
    assert states[0] == states[1] and list_saved_steps(resumed) == [6, 12]


def test_another_batch_size_continues_to_the_same_row(folder: Path) -> None:
    """60 rows are taken after step 6, so 13 steps of 4 rows reach row 112, and the sixth of them row 84."""
    resized = folder / "runs/resized"
    drawloom(folder, *WORDS, "run.name=resized")
    take_back(resized, 6)
    words = ("batch.global_size=4", "batch.micro_size=4", "run.name=resized", "--accept-changes")
    [outcome] = drawloom(folder, *WORDS, *words)
    assert "length  19 steps, 2 epochs" in outcome.text, outcome.text
    assert list_evaluated_steps(resized) == [3, 6, 12, 19] and list_saved_steps(resized) == [6, 19]


def test_two_processes_take_the_steps_of_one(folder: Path) -> None:
    """Epochs count the rows of all data-parallel ranks."""
    outcomes = drawloom(folder, *WORDS, "run.name=two", "mesh.data_replicate=2", ranks=2)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes[0].text
    assert list_evaluated_steps(folder / "runs/two") == [3, 6, 9, 12] and list_saved_steps(folder / "runs/two") == [
        6,
        12,
    ]


def test_plans_and_learning_rates_count_the_steps(folder: Path) -> None:
    """A plan for another number of ranks opens the data in one process."""
    words = ("tiny.toml", "trainer.epochs=3", "batch.micro_size=1", "--device", "h100", "--ranks", "4")
    [outcome] = drawloom(folder, "plan", *words)
    assert "3 epochs of 56 rows: 42 steps in " in outcome.text, outcome.text
    [outcome] = drawloom(folder, "lr", "tiny.toml", "trainer.epochs=3")
    assert "step 42" in outcome.text, outcome.text
    [outcome] = drawloom(folder, "plan", "tiny.toml", "trainer.epochs=3", "corpus.paths=['none']", "--device", "h100")
    assert outcome.code == 1 and "write trainer.steps=N" in outcome.text, outcome.text


ENDLESS = """
from drawloom import component
from drawloom.components.state.batch import Batch


@component
class Endless:
    def next_step(self) -> list[Batch]:
        raise NotImplementedError
"""


def test_data_that_counts_no_epochs_is_refused(folder: Path) -> None:
    """The length and every interval in epochs are problems, with the remedy."""
    (folder / "endless.py").write_text(ENDLESS, "utf-8")
    [outcome] = drawloom(folder, "check", *WORDS[1:], "--import", "endless.py", "data.use=endless")
    assert outcome.code == 2
    for place in ("[trainer]", "[evaluate]", "[checkpoint]"):
        assert f"{place} no data of the run counts epochs; write a number of steps" in outcome.text, outcome.text
