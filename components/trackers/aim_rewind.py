"""
Taking back what an Aim run holds of later steps.

Aim itself only overwrites: tracking a step again replaces its value, but steps that are not tracked again stay. A
sequence is four arrays (value, epoch, time, step) under keys that Aim hashes from the step, and a summary beside them
that the next `Run` object reads.
"""

from typing import Any

COLUMNS = ("val", "epoch", "time", "step")


def forget_after(run: Any, step: int) -> None:
    """Remove every metric's values after a step. The run is open for writing; close it before it tracks again."""
    for context, names in run.meta_run_tree.get("traces", {}).items():
        for name, summary in names.items():
            _cut(run, (context, name), summary["version"], step)


def _cut(run: Any, metric: tuple[int, str], version: int, step: int) -> None:
    series = run.series_run_trees[version].subtree(metric)
    keys, steps = series.array("step", dtype="int64").sparse_list()
    keys_by_step = dict(sorted(zip(steps, keys, strict=True)))
    gone = [number for number in keys_by_step if number > step]
    for number in gone:
        key = keys_by_step.pop(number)
        for column in COLUMNS:
            del series[column, key]
    if gone:
        _summarise(run, metric, {number: series["val", key] for number, key in keys_by_step.items()})


def _summarise(run: Any, metric: tuple[int, str], values: dict[int, float]) -> None:
    """Say what is left; with a last step of -1 Aim takes the next value for the first."""
    summary: dict[str, Any] = {"last_step": -1, "max": float("-inf"), "min": float("inf")}
    if values:
        last = max(values)
        most, least = max(values.values()), min(values.values())
        summary = {"last_step": last, "last": values[last], "max": most, "min": least}
    for name, value in summary.items():
        run.meta_run_tree[("traces", *metric, name)] = value
