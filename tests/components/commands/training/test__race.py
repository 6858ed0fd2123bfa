"""Races between recipes, over given results."""

import json
from pathlib import Path

import pytest

from drawloom.components.commands.training._race import Arm, AskRun, Ledger, Race, Rounds
from drawloom.components.commands.training.sweep import ProcessPool, SweepCommand
from drawloom.graph.cli.arguments import parse_command
from drawloom.graph.project import Project

LOSSES = {"slow": 3.0, "fast": 2.0, "other": 2.0}


def make_ledger(path: Path, seeds: int) -> Ledger:
    """Return a ledger in which `slow` is a tenth of its spread apart from the others, for seeds of the first rounds."""
    ledger = Ledger(path, {"metric": "loss"})
    for seed in range(seeds):
        for number, (name, loss) in enumerate(LOSSES.items()):
            value = loss + 0.1 * ((seed * 7 + number * 3) % 5)
            ledger.record(AskRun(name, seed, value, "", steps=2, seconds=1.0, lock=path / "lock"))
    return ledger


def test_a_recipe_leaves_the_race_when_another_one_is_better(tmp_path: Path) -> None:
    """
    The race is between all until a comparison is decided, and then between the rest, whose next seed is the first
    without results. A file read again gives the same race.
    """
    ledger = make_ledger(tmp_path / "ask.json", 12)
    race = Race(list(LOSSES), ledger, "lowest", 0.05)
    assert race.find_remaining_and_seed() == (["fast", "other"], 12)
    assert Race(list(LOSSES), ledger, "highest", 0.05).find_remaining_and_seed() == (["slow"], 6)
    again = Ledger.open(tmp_path / "ask.json", {"metric": "loss"})
    assert (again.runs, again.cost) == (ledger.runs, ledger.cost)
    assert {pair.decision for pair in race.compare_pairs(3)} == {"undecided"}


@pytest.mark.parametrize("last", [{"loss": None}, {"validation_loss": None}])
def test_a_finished_run_that_is_not_finite_has_no_value(tmp_path: Path, last: dict[str, None]) -> None:
    """
    JSON has null for NaN and infinity, and a skipped step has no loss: such a run has no value, and a reason.
    A line that a kill has left incomplete is no row.
    """
    sweep = parse_command(SweepCommand, "sweep", ["first_run"])
    arm = Arm("first", sweep, [], tmp_path)
    folder = arm.make_run_folder(0)
    folder.mkdir()
    rows = [{"step": 1, "loss": 2.0, "validation_loss": 3.0}, {"step": 2, "loss": 1.0, **last}]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"st', "utf-8")
    ledger = Ledger(tmp_path / "ask.json", {"metric": "validation_loss"})
    rounds = Rounds(Project.from_package("drawloom"), {"first": arm}, ledger, ProcessPool(1))
    run = rounds.read_result("first", 0, 1.0)
    assert run.value is None and run.problem == f"its last {next(iter(last))} is not finite" and run.steps == 2
