"""
Taking back what an Aim run holds of later steps.

Aim itself only overwrites: tracking a step again replaces its value, but steps that are not tracked again stay. A
sequence is four arrays (value, epoch, time, step) under keys that Aim hashes from the step, and a summary beside them
that the next `Run` object reads.
"""

from itertools import product
from typing import Any

COLUMNS = ("val", "epoch", "time", "step")
NUMBERS = 2  # the version of Aim's layout that it gives to series of numbers


def forget_after(run: Any, step: int) -> None:
    """Remove every metric's values after a step. The run is open for writing; close it before it tracks again."""
    for context, names in run.meta_run_tree.get("traces", {}).items():
        for name in names:
            _cut(run, (context, name), step)


def _cut(run: Any, metric: tuple[int, str], step: int) -> None:
    """Remove later steps, and those that a killed process left with some of their columns only."""
    series = run.series_run_trees[NUMBERS].subtree(metric)
    columns = {name: dict(zip(*series.array(name).sparse_list(), strict=True)) for name in COLUMNS}
    whole = set.intersection(*map(set, columns.values()))
    kept = {key: number for key, number in columns["step"].items() if number <= step and key in whole}
    gone = set().union(*columns.values()) - kept.keys()
    for name, key in product(COLUMNS, gone):
        del series[name, key]
    if gone:
        _summarise(run, metric, {number: columns["val"][key] for key, number in kept.items()})


def _summarise(run: Any, metric: tuple[int, str], values: dict[int, float]) -> None:
    """Say what is left; with a last step of -1 Aim takes the next value for the first."""
    summary: dict[str, Any] = {"last_step": -1, "max": float("-inf"), "min": float("inf")}
    if values:
        last = max(values)
        most, least = max(values.values()), min(values.values())
        summary = {"last_step": last, "last": values[last], "max": most, "min": least}
    for name, value in summary.items():
        run.meta_run_tree[("traces", *metric, name)] = value
