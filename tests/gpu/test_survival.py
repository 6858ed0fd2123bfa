"""Runs over NCCL that continue in memory after the loss of a process; each process has a GPU of its own."""

import time
from pathlib import Path

import pytest
import torch

from support.survival import assert_same_trajectory, restart_workers, survive, write_recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a corpus and the recipe."""
    return write_recipe(tmp_path)


@pytest.mark.parametrize(
    ("dead", "words"),
    [
        ({0: ("forward_backward", 3)}, ()),
        ({0: ("forward_backward", 3, "stopped")}, ()),
        ({1: ("report", 4, "stuck")}, ("listeners.timeouts.step=6",)),
        ({1: ("forward_backward", 5)}, ("mesh.data_shard=2", "checkpoint.neighbour_every=2")),
    ],
    ids=["killed", "stopped", "stuck", "shards"],
)
def test_the_other_process_continues(folder: Path, dead: dict[int, tuple[str, int]], words: tuple[str, ...]) -> None:
    """It aborts its communicators, also while a kernel waits for the lost rank, and repeats the step alone."""
    failures, outcomes = survive(folder, 2, dead, *words)
    assert failures.keys() == dead.keys()
    [outcome] = outcomes.values()
    assert outcome.code == 0, outcome.text
    assert "1 of 2 processes continue" in outcome.text
    assert_same_trajectory(folder, *words, rel=1e-4)


@pytest.mark.parametrize(("dead", "fault"), [(0, "killed"), (1, "stopped")])
def test_a_spare_takes_the_gpu_of_a_lost_process(folder: Path, dead: int, fault: str) -> None:
    """The numbers are an undisturbed run's. NCCL refuses two ranks on one GPU, so the spare uses the free one."""
    failures, outcomes = survive(folder, 2, {dead: ("forward_backward", 5, fault)}, spares=1)
    assert failures.keys() == {dead}
    assert [outcome.code for outcome in outcomes.values()] == [0, 0], outcomes
    assert "1 of 2 processes continue; 1 process joins" in "".join(outcome.text for outcome in outcomes.values())
    assert_same_trajectory(folder, rel=1e-4)


@pytest.mark.parametrize(
    "words", [(), ("mesh.data_shard=2", "checkpoint.neighbour_every=1")], ids=["replicas", "shards"]
)
def test_restarted_processes_join(folder: Path, words: tuple[str, ...]) -> None:
    """First rank 1 is killed and joins again, then rank 0; the numbers are an undisturbed run's."""
    words = ("trainer.steps=80", "--import=waiting.py", *words)
    code, text = restart_workers(folder, 2, words)
    assert code == 0 and "Traceback" not in text, text
    assert text.count("1 of 2 processes continue") == 2 and text.count("1 process joins") == 2, text
    assert_same_trajectory(folder, *words, rel=1e-4)


def test_channels_between_stages_are_aborted(folder: Path) -> None:
    """A lost stage has no replica, and the other stage, which waits for its message, ends with the reason."""
    start = time.monotonic()
    words = "mesh.pipeline=2", "model.num_hidden_layers=2"
    failures, outcomes = survive(folder, 2, {1: ("forward_backward", 5)}, *words)
    assert failures.keys() == {1} and time.monotonic() - start < 60
    [outcome] = outcomes.values()
    assert outcome.code == 1 and "rank 1" in outcome.text and "is gone" in outcome.text
