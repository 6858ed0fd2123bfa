"""Seeds of a recipe as a group."""

import statistics
from pathlib import Path

import pytest

from drawloom.components.report.run_record import Drawings, RunRecord, read_run_record
from drawloom.components.report.seed_groups import find_last_common_step, group_runs_by_settings
from support.run_folders import write_run


def read_runs(folder: Path, *runs: tuple[str, float, int, tuple[float, ...]]) -> list[RunRecord]:
    """Write and read runs, given their names, learning rates, seeds and validation losses."""
    for name, lr, seed, losses in runs:
        write_run(folder / name, lr=lr, seed=seed, losses=losses)
    return [read_run_record(folder / name, name, Drawings()) for name, *_ in runs]


def test_seeds_are_grouped_and_recipes_are_not(tmp_path: Path) -> None:
    """Groups have the order of their first runs, and the names of the settings in which they differ."""
    runs = read_runs(
        tmp_path, ("a", 1e-3, 0, (1.0,)), ("b", 1e-4, 0, (1.0,)), ("c", 1e-3, 1, (1.0,)), ("d", 1e-3, 2, (1.0,))
    )
    first, second = group_runs_by_settings(runs)
    assert [run.name for run in first.runs] == ["a", "c", "d"] and [run.name for run in second.runs] == ["b"]
    assert (first.name, second.name) == ("lr=0.001", "b")
    assert first.settings == {"optimizer.lr": "0.001"} and second.settings == {"optimizer.lr": "0.0001"}


def test_spreads_are_means_with_sample_deviations(tmp_path: Path) -> None:
    """At a step, and of the smallest values; a run without the step has no part, so there is no spread."""
    losses = [(3.0, 1.0, 2.0), (3.0, 2.0, 4.0), (3.0, 6.0)]
    [group] = group_runs_by_settings(
        read_runs(tmp_path, *((f"s{seed}", 1e-3, seed, row) for seed, row in enumerate(losses)))
    )
    assert find_last_common_step([group], "validation_loss") == 2
    spread = group.spread_at_step("validation_loss", 2)
    assert spread is not None and spread.mean == 3.0
    assert spread.deviation == pytest.approx(statistics.stdev([1.0, 2.0, 6.0]))
    assert group.spread_at_step("validation_loss", 3) is None and group.spread_at_step("other", 2) is None
    best = group.spread_of_best_values("validation_loss")
    assert best is not None and best.mean == pytest.approx(statistics.fmean([1.0, 2.0, 3.0]))
    curve = group.curves_over_seeds()["validation_loss"]
    assert (curve.x, curve.y, curve.low, curve.high) == ([1, 2], [3, 3], [3, 1], [3, 6])


def test_runs_without_a_recipe_are_apart(tmp_path: Path) -> None:
    """Their recipe is unknown."""
    runs = read_runs(tmp_path, ("a", 1e-3, 0, (1.0,)), ("b", 1e-3, 0, (1.0,)))
    assert len(group_runs_by_settings(runs)) == 1
    for name in "ab":
        (tmp_path / name / "recipe.lock.toml").unlink()
    assert [
        group.name
        for group in group_runs_by_settings([read_run_record(tmp_path / name, name, Drawings()) for name in "ab"])
    ] == [
        "a",
        "b",
    ]
