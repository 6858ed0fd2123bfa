"""Tracker for Weights & Biases."""

import uuid
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from drawloom import component, internal, setting
from drawloom.components.storage.durable_files import create_folder_unless_link
from drawloom.components.trackers.background import LoggedRunTracker, import_tracker_package
from drawloom.ports import NodeState, RunFolder, RunInfo, run_log

STEP = "step"
METRICS_ONLY = {"silent": True, "console": "off", "disable_code": True, "disable_git": True, "x_disable_stats": True}


@component(impact="safe", needs={"wandb": "drawloom[wandb]"})
class WandbTracker(LoggedRunTracker):
    """
    Weights & Biases tracker: writes online, or to `wandb` in the run folder, which `wandb sync` uploads later.

    A resumed run continues its Weights & Biases run. Weights & Biases can't delete steps, so repeated steps
    appear twice, at the same `step`, the charts' axis. Only metrics and the recipe's settings are
    recorded: no terminal output, environment, code or system metrics.

    A thread writes, so the network can't delay a step or end the run. Steps not accepted in time are dropped, with one
    warning.
    """

    called: ClassVar[str] = "Weights & Biases"

    folder: RunFolder
    job: RunInfo
    project: str = setting("project name", default="drawloom")
    entity: str | None = setting("the project's user or team; default: the account's default", default=None)
    mode: Literal["online", "offline"] = setting(
        '"online" needs `wandb login` once; "offline" writes to the run folder only', default="online"
    )

    _id: str = internal(factory=lambda: uuid.uuid4().hex[:8])

    def state_dict(self) -> NodeState:
        """Return `run`, the Weights & Biases run identifier."""
        return {"run": self._id}

    def load_state_dict(self, state: NodeState) -> None:
        """Continue the Weights & Biases run with the saved identifier."""
        self._id = state["run"]

    def _load_package_and_create_files(self) -> None:
        self._package = import_tracker_package("wandb", "wandb")
        create_folder_unless_link(self.folder.folder / "wandb")

    def _open_writer_after(self, step: int) -> None:
        if self._run is not None:
            return  # its steps can't be deleted
        self._run = self._package.init(
            project=self.project,
            entity=self.entity,
            name=self.job.name,
            id=self._id,
            resume="allow" if self.mode == "online" else None,
            mode=self.mode,
            dir=str(self.folder.folder),
            config=dict(self._properties),
            settings=self._package.Settings(**METRICS_ONLY),
        )
        if self.mode == "online":
            run_log.info("Weights & Biases: %s", self._run.url)
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({STEP: step, **values})
