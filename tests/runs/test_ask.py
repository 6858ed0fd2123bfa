"""Questions whether a recipe is better than another one."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.report.events import read_log
from support.forked_children import fork_children
from support.processes import run_ranks
from support.runs import drawloom

ASK = ["ask", "--than", "tiny.toml", "--edit=optimizer.lr=0.1", "trainer.steps=2", "trainer.on_finish=[]"]
FOLDER = "runs/lr=0.1-or-tiny"


def read_ledger(folder: Path) -> list[dict[str, Any]]:
    """Return the recorded runs."""
    path = folder / FOLDER / "ask.json"
    runs: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["runs"] if path.exists() else []
    return runs


def ask_and_kill(folder: Path, after_runs: int) -> int:
    """Ask in forks, kill the command alone when a run has begun after `after_runs` results; return the exit code."""
    fork_children()
    asked = subprocess.Popen([sys.executable, "-m", "drawloom", *ASK, "--budget", "8steps"], cwd=folder)
    while asked.poll() is None:
        locks = list((folder / FOLDER).glob("*/seed=*/run.lock"))
        if len(read_ledger(folder)) >= after_runs and len(locks) > after_runs:
            asked.kill()
        time.sleep(0.01)
    return asked.returncode


@pytest.mark.soak
def test_a_killed_question_is_resumed_without_lost_or_doubled_pairs(folder: Path) -> None:
    """
    Killed twice with SIGKILL while a run goes on without it, the command waits for this run and uses its result. In
    the end every recipe has every seed once, trained once, and both start from the same seed's weights.
    """
    for after_runs in (0, 2):
        [code] = run_ranks(ask_and_kill, 1, folder, after_runs, timeout=240, variables=False)
        assert code == -signal.SIGKILL
    outcome = drawloom(folder, *ASK, "--budget", "8steps", "--format", "json")[0]
    assert outcome.code == 0, outcome.text
    runs = read_ledger(folder)
    assert sorted((run["recipe"], run["seed"]) for run in runs) == [
        ("lr=0.1", 0),
        ("lr=0.1", 1),
        ("tiny", 0),
        ("tiny", 1),
    ]
    assert [run["steps"] for run in runs] == [2] * 4
    for run in runs:
        rows = [json.loads(line) for line in (folder / run["lock"]).with_name("metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [1, 2] and rows[-1]["validation_loss"] == run["value"]
        assert read_log((folder / run["lock"]).parent).lost == 0
    again = drawloom(folder, *ASK, "--budget", "8steps")[0]
    assert "seed " not in again.text and "undecided between tiny and lr=0.1" in again.text, again.text
    assert "against tiny" in again.text and (folder / FOLDER / "ask.html").read_text("utf-8").count("undecided") == 2
    other = drawloom(folder, *ASK, "--budget", "8steps", "--error", "0.01")[0]
    assert other.code == 2 and "has another question (error)" in other.text, other.text


def test_a_failed_run_is_the_worst_of_its_pair_and_named(folder: Path) -> None:
    """A run that diverges, and so fails, has no value, loses its pair, and the effect has no mean."""
    words = ["--edit=optimizer.lr=1e30", "--edit=optimizer.lr=1e-3", "--to", "asked", *ASK[4:]]
    outcome = drawloom(folder, "ask", "--than", "tiny.toml", *words, "--budget", "12steps", "--format=json")[0]
    assert outcome.code == 0, outcome.text
    result = json.loads(outcome.text[outcome.text.index("{") :])
    first, second, third = result["comparisons"]
    assert (first["recipe"], first["baseline"], first["effect"]) == ("lr=1e+30", "tiny", None)
    assert (first["wins"], first["losses"], second["effect"] is None, third["wins"]) == (0, 2, False, 2)
    problems = {run["recipe"]: run["problem"] for run in result["runs"] if run["problem"]}
    assert problems == {"lr=1e+30": "its process ended with exit code 1"}
    assert result["answer"] is None and result["remaining"] == ["tiny", "lr=1e+30", "lr=0.001"]


def test_questions_without_an_answer_are_refused_before_a_run(folder: Path) -> None:
    """Equal recipes, an unknown metric, a small budget, and fixed seeds have one reason each, and nothing has run."""
    (folder / "same.toml").write_text('extends = "./tiny.toml"\nreport.every = 3\n', "utf-8")
    other, metric = "--edit=optimizer.lr=0.1", "--metric=validation_los"
    refusals = {
        "tiny and same train alike": ["same.toml"],
        "no phase of tiny writes it; did you mean 'validation_loss'?": [other, metric],
        "two pairs cost 40 steps, and the budget is 39 steps": [other, "--budget=39steps"],
        "minutes, and the budget is 1e-06 minutes": [other, "--budget=0.000001m"],
        "run.seed=3: the question names its runs": [other, "run.seed=3"],
        "'9' is not a budget": [other, "--budget=9"],
        "sets no value": ["--edit=lr"],
        "there is nothing to compare": [],
    }
    for reason, words in refusals.items():
        outcome = drawloom(folder, "ask", "--than=tiny.toml", "--budget=99steps", *words)[0]
        assert outcome.code == 2 and reason in outcome.text, outcome.text
    assert not (folder / "runs").exists()
