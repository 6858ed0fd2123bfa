"""Pipelines with a killed or stopped rank."""

import signal
from pathlib import Path

import pytest

from support.processes import RanksFailedError, run_ranks
from support.runs import run_and_strike


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_surviving_rank_names_its_action(folder: Path, number: int) -> None:
    """A rank that waits for a killed or stopped rank ends in time and names itself and its blocked action."""
    arguments = [
        *(
            "run",
            "tiny.toml",
            "model.num_hidden_layers=2",
            "batch.micro_size=1",
            "mesh.pipeline=2",
            "trainer.steps=1000000",
        ),
        *(
            "checkpoint.every='last'",
            "processes.timeout=3.0",
            "listeners.timeouts.step=4.0",
            "listeners.timeouts.first_step=20.0",
        ),
    ]
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(run_and_strike, 2, folder, arguments, int(number), timeout=60, lost={1})
    output = (folder / "runs/tiny/log/rank-0.log").read_text("utf-8")
    survivor = caught.value.values.get(0)
    if survivor is not None:
        assert survivor.code == 1 and "Traceback" not in survivor.text
        output += survivor.text
    assert "rank 0" in output
    assert "stage" in output or "in group" in output, output  # it may have been between stages, in a sum over ranks
