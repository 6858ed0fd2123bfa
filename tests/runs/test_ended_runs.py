"""Runs that a phase ends before their last step."""

from pathlib import Path

from drawloom.components.report.events import read_log
from support.processes import run_ranks
from support.runs import REPORT, deterministic_rows, drawloom
from support.survival import run_with_deaths

STOPPING = [
    "run",
    "tiny.toml",
    "early_stopping.use=phases.early_stopping",
    "early_stopping.min_change=10",
    "edit.trainer.phases.before.@report=@early_stopping",
    "evaluate.every=2",
    *REPORT,
]


def test_an_early_stop_is_a_normal_end(folder: Path) -> None:
    """
    The run ends with a checkpoint, an export, a sample and a report; started again it does nothing, and with more
    patience it goes on as if it had never ended.
    """
    run = folder / "runs/tiny"
    ended = drawloom(folder, *STOPPING, "early_stopping.patience=1")[0]
    assert ended.code == 0 and "the run ends after step 4: validation_loss was" in ended.text, ended.text
    assert "trained steps 1 to 4" in ended.text
    assert {"export", "sample.txt", "report.html"} <= {path.name for path in run.iterdir()}
    assert (run / "checkpoints/step-4").is_dir() and len(deterministic_rows(run)) == 4
    log = read_log(run)
    assert not log.running and next(event.kind for event in log.events if event.step == 4) == "ended"
    again = drawloom(folder, *STOPPING, "early_stopping.patience=1")[0]
    assert again.code == 0 and "finished: the run ended after step 4: validation_loss was" in again.text, again.text
    assert len(deterministic_rows(run)) == 4
    longer = drawloom(folder, *STOPPING, "early_stopping.patience=3")[0]
    assert longer.code == 0 and "the run ends after step 8" in longer.text, longer.text
    straight = drawloom(folder, *STOPPING, "early_stopping.patience=3", "run.name=straight")[0]
    assert straight.code == 0, straight.text
    assert deterministic_rows(run) == deterministic_rows(folder / "runs/straight")
    export = "export/model.safetensors"
    assert (run / export).read_bytes() == (folder / "runs/straight" / export).read_bytes()


def test_ranks_end_together_with_a_budget(folder: Path) -> None:
    """Two ranks stop after the step that uses the tokens of the budget up, and evaluate in it."""
    budget = ["budget.use=phases.budget", "budget.tokens=300", "edit.trainer.phases.before.@evaluate=@budget"]
    words = ["run", "tiny.toml", "mesh.data_replicate=2", "batch.micro_size=2", *budget]
    outcomes = drawloom(folder, *words, ranks=2)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    rows = deterministic_rows(folder / "runs/tiny")
    assert rows[-2]["tokens"] < 300 <= rows[-1]["tokens"] and rows[-1]["validation_loss"] > 0
    assert f"the run ends after step {len(rows)}: the budget of 300 tokens" in outcomes[0].text


def test_a_signal_to_one_rank_in_the_last_step_ends_all(folder: Path) -> None:
    """
    A signal too late for the last step's agreement ends both ranks before the final tasks, whose collectives need both.

    So does one that GPUs would agree on in a next step. The same command completes the run.
    """
    (folder / "recipe.toml").write_text('extends = "tiny.toml"\n')
    words = ("mesh.data_replicate=2", "batch.micro_size=2")
    outcomes = run_ranks(run_with_deaths, 2, folder, words, {1: ("final tasks", 1, "terminated")}, 0, 0, grace=30)
    assert [outcome.code for outcome in outcomes] == [143, 143], outcomes
    assert "stopped by signal 15 after training" in outcomes[0].text and "Traceback" not in outcomes[0].text
    assert not (folder / "runs/tiny/export").exists()
    outcomes = drawloom(folder, "run", "recipe.toml", *words, ranks=2)
    assert [outcome.code for outcome in outcomes] == [0, 0] and (folder / "runs/tiny/export").exists(), outcomes
