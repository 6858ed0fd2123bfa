"""The table of runs."""

import csv
import io
import json
from pathlib import Path

import pytest

from drawloom.graph.cli.main import main
from support.run_folders import write_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return two runs with different learning rates."""
    write_run(tmp_path / "runs/a", lr=1e-3, losses=(3.0, 2.0))
    write_run(tmp_path / "runs/b", lr=3e-4, losses=(3.0, 1.5))
    return tmp_path / "runs"


def test_a_terminal_gets_aligned_columns(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run has a line with its differing settings; sorting puts the best one first."""
    assert main(["runs", str(runs), "--sort", "best"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "run  state    step    loss    best  tokens/s  differs in",
        "b    unknown     2  2.5000  1.5000        50  optimizer.lr=0.0003",
        "a    unknown     2  3.0000  2.0000        50  optimizer.lr=0.001",
    ]


def test_csv_and_json_have_all_values(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both are read back by a parser of the format, with every digit."""
    assert main(["runs", str(runs), "--format", "csv"]) == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert main(["runs", str(runs), "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert [float(row["best"]) for row in table] == [row["best"] for row in rows] == [2.0, 1.5]
    assert [row["optimizer.lr"] for row in table] == [row["differs"]["optimizer.lr"] for row in rows]
    assert table[0]["steps"] == "" and rows[0]["steps"] is None


def test_runs_are_filtered_by_state(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without any, text says so and the list in JSON is empty."""
    for format, printed in (("text", "no runs\n"), ("json", '{\n "runs": []\n}\n')):
        assert main(["runs", str(runs), "--state", "finished", "--format", format]) == 0
        assert capsys.readouterr().out == printed


def test_a_missing_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error suggests another argument."""
    assert main(["runs", str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_a_last_step_without_a_finite_loss_has_none(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A diverged run does not show the loss of an earlier step beside its last one."""
    with (runs / "a/metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 3, "loss": null, "tokens": 300}\n')
    assert main(["runs", str(runs), "--format", "json"]) == 0
    diverged, other = json.loads(capsys.readouterr().out)["runs"]
    assert (diverged["step"], diverged["loss"], diverged["best"]) == (3, None, 2.0) and other["loss"] == 2.5
