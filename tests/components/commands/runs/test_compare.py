"""`drawloom compare`."""

import json
from pathlib import Path

import pytest

from drawloom.graph.cli.main import main
from support.run_folders import write_run

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two seeds with each of two learning rates."""
    for lr, end in ((1e-3, 2.0), (3e-4, 4.0)):
        for seed in (0, 1):
            write_run(tmp_path / f"sweep/lr={lr},seed={seed}", lr=lr, seed=seed, losses=(9.0, end + seed))
    return tmp_path / "sweep"


def test_settings_spreads_and_curves_are_printed(sweep: Path, capsys: Capture) -> None:
    """Settings by node, a row per group, and a letter per curve; the report has the same groups."""
    page = sweep.parent / "page.html"
    assert main(["report", str(sweep), "--to", str(page)]) == 0
    capsys.readouterr()
    assert main(["compare", str(sweep)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["[optimizer]", "  lr = 0.0003 | 0.001"]
    [row] = [line.split() for line in lines if line.startswith("lr=0.001 ") and "2.5000" in line]
    assert row == ["lr=0.001", "2", "2.5000", "±", "0.71", "2.5000", "±", "0.71"]
    pictures = [line for line in lines if "│" in line]
    assert "*" in pictures[0] and pictures[-1].rstrip().endswith("b")
    assert "lr=0.001 (2 seeds)" in page.read_text("utf-8")


def test_json_has_the_same_numbers(sweep: Path, capsys: Capture) -> None:
    """Means at the last common step, and curves with all steps."""
    assert main(["compare", str(sweep), "--format", "json", "--metric", "validation_loss"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["last_steps"] == {"validation_loss": 2}
    first, second = (group["metrics"]["validation_loss"] for group in printed["groups"])
    assert first["end"]["mean"] == 4.5 and second["best"]["mean"] == 2.5
    assert (second["steps"], second["values"]) == ([1, 2], [9, 2.5])


@pytest.mark.parametrize(
    ("words", "reason"),
    [(["lr=0.001,seed=0"], "1 runs; give two"), ([".", "--metric", "speed"], "they have"), (["none"], "no folder")],
)
def test_mistakes_are_named(
    sweep: Path, words: list[str], reason: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run, an unknown metric and a missing folder are refused."""
    monkeypatch.chdir(sweep)
    assert main(["compare", *words]) == 2 and reason in capsys.readouterr().err


def test_a_metric_that_a_seed_lacks_is_left_out(sweep: Path, capsys: Capture) -> None:
    """A run that was not evaluated yet has no mean with the other seed, whether the metric is asked for or not."""
    folders = [str(folder) for folder in sorted(sweep.glob("lr=0.001,*"))]
    path = Path(folders[0]) / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 5.0}\n', "utf-8")
    assert main(["compare", *folders]) == 0
    assert "loss after step 1" in (printed := capsys.readouterr().out) and "validation_loss" not in printed
    assert main(["compare", *folders, "--metric", "validation_loss"]) == 2
    assert "it is not in the same step of all runs" in capsys.readouterr().err
