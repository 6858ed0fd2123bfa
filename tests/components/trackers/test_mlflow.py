"""Metrics with MLflow, in its own database."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.ports.tracking import Histogram
from drawloom.components.trackers.background import import_tracker_package
from drawloom.components.trackers.mlflow import MlflowTracker
from drawloom.graph import UserError
from support.folders import Folder


def open_tracker(folder: Path, mesh: Any, job: Any, properties: dict[str, Any]) -> MlflowTracker:
    """Return a tracker as in a run's process."""
    tracker = MlflowTracker(folder=Folder(folder), mesh=mesh, job=job, timeout=120)
    tracker.open()
    tracker.store_properties(properties)
    return tracker


@pytest.mark.soak  # the package has twenty behind it, and makes its database in 8 s
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what MLflow imports
def test_a_resumed_run_continues_the_run(tmp_path: Path, one_rank: Any, job: Any) -> None:
    """MLflow reads values by step, params, changed settings as tags, and histograms as artifacts, of one run."""
    pytest.importorskip("mlflow", reason="needs the package mlflow: pip install 'drawloom[mlflow]'")
    first = open_tracker(tmp_path, one_rank, job, {"optimizer": {"lr": 0.1, "betas": [0.9, 0.95]}})
    first.rewind(0)
    for step in (1, 2):
        first.track(step, {"loss": float(step), "norms/a*b": 0.5, "grad_norm": None})
    first.track_distributions(2, {"weights/a": Histogram(0.0, 1.0, (3.0, 4.0))})
    first.close()
    second = open_tracker(tmp_path, one_rank, job, {"optimizer": {"lr": 0.2, "betas": [0.9, 0.95]}, "run": {"seed": 3}})
    second.rewind(2)
    second.track(3, {"loss": 3.0})
    second.close()
    client = import_tracker_package("mlflow", "mlflow", "mlflow.entities").MlflowClient(
        f"sqlite:///{tmp_path / 'mlflow.db'}"
    )
    experiment = client.get_experiment_by_name("drawloom")
    [run] = client.search_runs([experiment.experiment_id])
    history = {name: client.get_metric_history(run.info.run_id, name) for name in ("loss", "norms/a_b")}
    steps = {name: [(point.step, point.value) for point in points] for name, points in history.items()}
    assert steps == {"loss": [(1, 1.0), (2, 2.0), (3, 3.0)], "norms/a_b": [(1, 0.5), (2, 0.5)]}
    assert run.data.params == {"optimizer.lr": "0.1", "optimizer.betas": "[0.9, 0.95]", "run.seed": "3"}
    assert run.data.tags["optimizer.lr"] == "0.2" and "optimizer.betas" not in run.data.tags
    assert (run.info.run_name, run.info.status) == (job.name, "FINISHED")
    [artifact] = tmp_path.glob("mlflow/*/artifacts/distributions/weights/a/2.json")
    assert json.loads(artifact.read_text()) == {"step": 2, "edges": [0.0, 0.5, 1.0], "counts": [3.0, 4.0]}


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the package to install."""
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UserError, match=r"pip install 'drawloom\[mlflow\]'"):
        import_tracker_package("mlflow", "mlflow", "mlflow.entities")
