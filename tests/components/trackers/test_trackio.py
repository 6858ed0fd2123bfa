"""Metrics with Trackio."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.ports.tracking import Histogram
from drawloom.components.trackers.background import import_tracker_package
from drawloom.components.trackers.trackio import TrackioTracker
from drawloom.graph import UserError
from drawloom.graph.testing import fake
from support.checkpoints import SingleRankMesh
from support.processes import run_ranks


def track_and_resume(folder: Path) -> tuple[list[dict[str, Any]], Any]:
    """Return Trackio's values for a run with two steps, resumed after the first, in a process with a database."""
    os.environ["TRACKIO_DIR"] = str(folder)
    from drawloom.components.ports.run import RunInfo

    for done, losses in ((0, [1.0, 2.0]), (1, [-2.0])):
        job = fake(RunInfo, name="one", seed=0, folder_path=folder)
        tracker = TrackioTracker(mesh=SingleRankMesh(), job=job, timeout=60)
        tracker.open()
        tracker.store_properties({"run": {"name": "test"}})
        tracker.rewind(done)
        for step, loss in enumerate(losses, done + 1):
            tracker.track(step, {"loss": loss})
        tracker.track_distributions(1, {"weights/a": Histogram(0.0, 1.0, (3.0, 4.0))} if done else {})
        tracker.close()
    from trackio.sqlite_storage import SQLiteStorage

    return SQLiteStorage.get_logs("drawloom", "one"), SQLiteStorage.get_run_config("drawloom", "one")


@pytest.mark.soak  # the package has twenty behind it
def test_a_resumed_run_continues_the_run(tmp_path: Path) -> None:
    """Values are there by step, in one run of the project, with the properties and histograms."""
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("needs the package trackio, beside an older pillow: pip install 'drawloom[trackio]'")
    [(logs, config)] = run_ranks(track_and_resume, 1, tmp_path, variables=False)
    assert [(row["step"], row["loss"]) for row in logs if "loss" in row] == [(1, 1.0), (2, 2.0), (2, -2.0)]
    [drawn] = [row["weights/a"] for row in logs if "weights/a" in row]
    assert (drawn["bins"], drawn["values"]) == ([0.0, 0.5, 1.0], [3.0, 4.0])
    assert config["run"] == {"name": "test"}
    assert not [key for row in logs for key in row if key.startswith(("system", "gpu", "cpu"))]


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the package to install."""
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UserError, match=r"pip install 'drawloom\[trackio\]'"):
        import_tracker_package("trackio", "trackio")
