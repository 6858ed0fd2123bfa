"""Curves of a run: no spike is lost, whatever the number of steps, and a stranger's rows do no harm."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drawloom.components.report.metrics import MAX_NUMBERS, MAX_SERIES, Metrics, read_metrics
from drawloom.graph import UserError


def metrics_of(*rows: dict[str, Any]) -> Metrics:
    """Metrics of these rows."""
    metrics = Metrics()
    for row in rows:
        metrics.add_row(row)
    return metrics


def test_a_short_series_is_kept_unchanged() -> None:
    """Every point has its step and its value, and no band."""
    curve = metrics_of(*({"step": step, "loss": 1 / step} for step in range(1, 241))).thin_all_curves()["loss"]
    assert curve.x == list(range(1, 241)) and not curve.low and not curve.high
    np.testing.assert_allclose(curve.y, [1 / step for step in range(1, 241)], rtol=1e-5)


def test_a_long_series_loses_no_spike() -> None:
    """A point's mean, least and greatest values summarize all its steps."""
    values = np.random.default_rng(0).normal(size=12_345)
    values[7_777] = 1e6
    curve = metrics_of(
        *({"step": step + 1, "loss": float(value)} for step, value in enumerate(values))
    ).thin_all_curves()["loss"]
    assert len(curve.x) <= 1000 and curve.x[-1] == 12_345
    starts = [0, *curve.x[:-1]]
    buckets = [values[start:end] for start, end in zip(starts, curve.x, strict=True)]
    np.testing.assert_allclose(curve.y, [bucket.mean() for bucket in buckets], rtol=1e-5)
    np.testing.assert_allclose(curve.low, [bucket.min() for bucket in buckets], rtol=1e-5)
    np.testing.assert_allclose(curve.high, [bucket.max() for bucket in buckets], rtol=1e-5)


def test_many_series_share_the_space_of_a_few() -> None:
    """The curves of a run have a bounded number of numbers, and series beyond the limit are left out."""
    names = [f"metric {number}" for number in range(MAX_SERIES + 5)]
    metrics = metrics_of(*({"step": step, **dict.fromkeys(names, 0.5)} for step in range(1, 1501)))
    curves = metrics.thin_all_curves()
    assert len(curves) == MAX_SERIES and metrics.left_out == set(names[MAX_SERIES:])
    assert sum(4 * len(curve.x) for curve in curves.values()) <= MAX_NUMBERS


def test_tokens_and_seconds_of_a_step_add_up() -> None:
    """The time up to a step is the sum over steps of tokens divided by tokens per second."""
    rows = [
        {"step": 1, "tokens": 100, "tokens_per_second": 50.0},
        {"step": 2, "tokens": 400, "tokens_per_second": 100.0},
    ]
    assert metrics_of(*rows).thin_all_axes() == {"step": [1, 2], "tokens": [100, 400], "seconds": [2, 5]}
    assert metrics_of({"step": 1, "loss": 1.0}).thin_all_axes() == {
        "step": [1]
    }  # a switch to what is unknown is not offered


def test_an_evaluation_before_training_is_at_step_0() -> None:
    """Its curve begins there, and it takes neither tokens nor time."""
    start = {"step": 0, "validation_loss": 5.5}
    metrics = metrics_of(start, {"step": 1, "tokens": 100, "tokens_per_second": 50.0, "validation_loss": 4.0})
    assert (metrics.thin_all_curves()["validation_loss"].x, metrics.thin_all_curves()["validation_loss"].y) == (
        [0, 1],
        [5.5, 4],
    )
    assert metrics.thin_all_axes() == {"step": [0, 1], "tokens": [0, 100], "seconds": [0, 2]}


def test_rows_of_a_stranger_are_filtered(tmp_path: Path) -> None:
    """Numbers too large for JSON or a float, other types, repeated steps and cut lines are left out."""
    loss = [1.0, 10**400, None, True, "<b>", [1], -1e301]
    lines = [json.dumps({"step": step, "loss": value}) for step, value in enumerate(loss, 1)]
    lines += [
        '{"step": 1, "loss": 9}',
        '{"step": 99999999999999999999, "loss": 9}',
        '{"step": 8, "loss": NaN}',
        "[" * 99999,
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 9, "lo']), "utf-8")
    assert read_metrics(tmp_path).thin_all_curves()["loss"].y == [1]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """A report of a stranger's run folder cannot show another file."""
    (tmp_path / "metrics.jsonl").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="symbolic link"):
        read_metrics(tmp_path)
