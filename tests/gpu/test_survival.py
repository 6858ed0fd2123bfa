"""Runs over NCCL that continue after the loss of processes, which share a GPU if there is only one."""

import re
from pathlib import Path

import pytest

from support.survival import Deaths, assert_same_trajectory, replace_worker, survive, write_recipe

pytestmark = pytest.mark.gpu

ROUNDING = 1e-3  # of float32 on a GPU, whose sums have another order on fewer ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a corpus and the recipe."""
    return write_recipe(tmp_path)


def test_ranks_over_nccl_survive_one_loss_after_another(folder: Path) -> None:
    """Rank 0 is killed in a forward pass, rank 1 is stopped after an update, and the last rank computes the same."""
    deaths: Deaths = {0: ("forward_backward", 3), 1: ("report", 6, "stopped")}
    failures, outcomes = survive(folder, 3, deaths, "processes.heartbeat_timeout=3")
    assert failures == dict.fromkeys(deaths, "died with exit code -9") and outcomes[2].code == 0, outcomes
    text = "".join(path.read_text("utf-8") for path in (folder / "runs/tiny/log").iterdir())
    assert {*re.findall(r"restored the state after step (\d) from memory", text)} == {"2", "5"}
    assert_same_trajectory(folder, rel=ROUNDING)


def test_a_replaced_worker_joins_over_nccl(folder: Path) -> None:
    """A worker's successor receives the state over NCCL, and completes the run after the first worker's death."""
    words = "trainer.steps=40", "--import=waiting.py"
    code, errors = replace_worker(folder, 2, words)
    assert code == 0 and errors.count("1 of 1 processes continue; 1 process joins") == 1, errors
    assert_same_trajectory(folder, *words, rel=ROUNDING)
