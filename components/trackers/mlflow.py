"""Tracker for MLflow, in a database in the run folder or on a tracking server."""

import os
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from drawloom import component, internal, setting
from drawloom.components.storage.durable_files import create_folder_unless_link, open_to_append
from drawloom.components.trackers.background import ServiceTracker, import_tracker_package
from drawloom.components.trackers.remembered_run import read_stored_run_id, store_run_id
from drawloom.ports import Histogram, RunFolder, RunInfo, flatten_properties, run_log

REFUSED_CHARACTERS = re.compile(r"[^\w\-. :/]")
"""Characters that MLflow refuses in names."""

MAX_PARAMS = 100
"""Largest number of params in a request to MLflow."""

MAX_PARAM_LENGTH = 6000
"""Largest number of characters of a param's value in MLflow."""


@component(impact="safe", needs={"mlflow": "drawloom[mlflow]"})
class MlflowTracker(ServiceTracker):
    """
    MLflow tracker: writes to `mlflow.db` in the run folder or to a tracking server.

    `mlflow ui --backend-store-uri sqlite:///RUN_FOLDER/mlflow.db` of the package `mlflow` shows the database. The
    recipe's settings are params, and histograms are JSON artifacts `distributions/<name>/<step>.json`. A resumed run
    continues its MLflow run, whose identifier is in `mlflow_run.txt`. MLflow can't change params, so settings that
    differ after a resume become tags with the same names. MLflow can't delete steps, so steps that are done again
    appear twice. Only metrics and settings are recorded, and MLflow's telemetry is off.

    A thread writes, so a disk or the network can't delay a step or end the run. Steps not accepted in time are dropped,
    with one warning.
    """

    called: ClassVar[str] = "MLflow"

    folder: RunFolder
    job: RunInfo
    experiment: str = setting("experiment name", default="drawloom")
    uri: str | None = setting(
        "tracking server, such as https://host:5000; default: a database in the run folder", default=None
    )

    _mlflow: Any = internal(None)
    _client: Any = internal(None)
    _run: str = internal("")

    def _load_package_and_create_files(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # MLflow reads it at import
        self._mlflow = import_tracker_package("mlflow", "mlflow", "mlflow.entities", "mlflow.utils.time")
        if self.uri is None:
            os.close(open_to_append(self._database_path))
            create_folder_unless_link(self.folder.folder / "mlflow")

    def _open_writer_after(self, step: int) -> None:
        """Create an MLflow run, or continue the run named in the run folder; do nothing if one has begun."""
        if self._run:
            return
        is_local = self.uri is None
        self._client = self._mlflow.MlflowClient(f"sqlite:///{self._database_path.resolve()}" if is_local else self.uri)
        run = read_stored_run_id(self.folder.folder, "mlflow") or self._create_run()
        self._client.update_run(run, status="RUNNING")
        self._log_properties(run)
        self._run = run
        if not is_local:
            run_log.info("MLflow: run %s of experiment %s at %s", run, self.experiment, self.uri)

    def _write_values(self, step: int, numbers: Mapping[str, float]) -> None:
        self._open_writer_after(step - 1)
        now = self._mlflow.utils.time.get_current_time_millis()
        metrics = [
            self._mlflow.entities.Metric(_replace_refused_characters(name), value, now, step)
            for name, value in numbers.items()
        ]
        self._client.log_batch(self._run, metrics=metrics)

    def _write_distributions(self, step: int, distributions: Mapping[str, Histogram]) -> None:
        self._open_writer_after(step - 1)
        for name, histogram in distributions.items():
            content = {"step": step, "edges": histogram.edges, "counts": [*histogram.counts]}
            self._client.log_dict(self._run, content, f"distributions/{_replace_refused_characters(name)}/{step}.json")

    def _close_writer(self) -> None:
        run, self._run = self._run, ""
        if run:
            self._client.set_terminated(run)

    @property
    def _database_path(self) -> Any:
        """The path of the run folder's database."""
        return self.folder.folder / "mlflow.db"

    def _create_run(self) -> str:
        """Create a run, and store its identifier in the run folder before writing to the run."""
        known = self._client.get_experiment_by_name(self.experiment)
        location = (self.folder.folder / "mlflow").resolve().as_uri() if self.uri is None else None
        experiment = known.experiment_id if known else self._client.create_experiment(self.experiment, location)
        run: str = self._client.create_run(experiment, run_name=self.job.name).info.run_id
        store_run_id(self.folder.folder, "mlflow", run)
        return run

    def _log_properties(self, run_id: str) -> None:
        """Log new settings as params, and settings that differ from their params as tags."""
        flat = {
            _replace_refused_characters(key): str(value)[:MAX_PARAM_LENGTH]
            for key, value in flatten_properties(self._properties).items()
        }
        params = self._client.get_run(run_id).data.params
        new = [self._mlflow.entities.Param(key, value) for key, value in flat.items() if key not in params]
        for start in range(0, len(new), MAX_PARAMS):
            self._client.log_batch(run_id, params=new[start : start + MAX_PARAMS])
        for key, value in flat.items():
            if params.get(key, value) != value:
                self._client.set_tag(run_id, key, value)


def _replace_refused_characters(name: str) -> str:
    """Replace characters that MLflow refuses in names by _."""
    return REFUSED_CHARACTERS.sub("_", name)
