"""Runs whose loss spikes."""

from pathlib import Path

import pytest

from drawloom.components.checkpoint.reader import load_node_state
from support.runs import REPORT, deterministic_rows, drawloom, rows, series, take_back, write_corpus

GOES_BACK = """
extends = "tiny.toml"
[loss_spikes]
use = "phases.loss_spikes"
window = 3
deviations = 2.5
go_back = 9
[record]
use = "data.record"
[edit.trainer.phases]
after."@sync_gradients" = "@loss_spikes"
after."@forward_backward" = "@record"
"""


@pytest.mark.soak
def test_a_run_goes_back_past_the_rows_of_spikes(tmp_path: Path) -> None:
    """
    Each step is tracked once, the audit confirms its rows, and the log and the report name every return.

    A run resumed before a spike goes back again, with the same bits; two ranks go back at the same steps.
    """
    write_corpus(tmp_path)
    # Rows of bytes that no other text has, with a higher loss.
    (tmp_path / "corpus" / "part20.py").write_bytes(bytes(range(128, 190)).decode("latin-1").encode())
    (tmp_path / "spikes.toml").write_text(GOES_BACK)
    words = ["spikes.toml", "trainer.steps=30", "checkpoint.every=4", "checkpoint.keep=20", "batch.micro_size=2"]
    words.extend(REPORT)
    run, other = tmp_path / "runs/tiny", tmp_path / "runs/other"
    outcome = drawloom(tmp_path, "run", *words)[0]
    assert outcome.code == 0 and outcome.text.count("the run goes back, time ") >= 2, outcome.text
    assert [row["step"] for row in rows(run)] == [*range(1, 31)]
    assert "the run goes back, time 2 of 9" in (run / "report.html").read_text("utf-8")
    audited = drawloom(tmp_path, "data", "audit", "runs/tiny")[0]
    assert audited.code == 0, audited.text
    whole, last = deterministic_rows(run), load_node_state(run / "checkpoints/step-30", "loss_spikes")
    take_back(run, 16)
    again = drawloom(tmp_path, "run", *words)[0]
    assert again.code == 0 and "the run goes back, time 1 of 9" in again.text, again.text
    assert deterministic_rows(run) == whole and load_node_state(run / "checkpoints/step-30", "loss_spikes") == last
    two = drawloom(tmp_path, "run", *words, "run.name=other", "mesh.data_replicate=2", ranks=2)
    assert [outcome.code for outcome in two] == [0, 0], two
    losses = [[loss for (loss,) in series(folder, "loss")] for folder in (run, other)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert load_node_state(other / "checkpoints/step-30", "loss_spikes")["times"] == last["times"] >= 2
