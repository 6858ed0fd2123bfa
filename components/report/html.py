"""Final task: the run's report."""

import logging
from pathlib import Path

from drawloom import Every, ResolvedRecipe, component
from drawloom.components.distributed.rank_errors import run_on_rank0
from drawloom.ports import Batching, Mesh, RunFolder, Schedule

REPORT = "report.html"

log = logging.getLogger("drawloom.run")


@component(impact="safe")
class HtmlReport:
    """
    Final task with the output `report.html` in the run folder: curves, events, checkpoints, the sample and drawings.

    It also logs the run's effective training time ratio (ETTR). If the report can't be written, the task warns, and
    the run continues. `drawloom report` writes the same report for any run, or for several runs.
    """

    folder: RunFolder
    mesh: Mesh
    recipe: ResolvedRecipe
    schedules: Every[Schedule]
    batching: Every[Batching]

    def has_result_of_step(self, step: int) -> bool:
        """Return whether rank 0 has a report for this step. A collective, equal on all ranks."""
        return bool(run_on_rank0(self.mesh.world, lambda: self._has_report_of_step(step)))

    def run_after_training(self, step: int) -> None:
        """Write the report on rank 0."""
        if self.mesh.world.rank == 0:
            from drawloom.components.report.run_report import write_report  # a run needs it at its end alone

            try:
                write_report(self, step)
            except Exception as error:  # a failed report must not fail the run
                log.warning("the report can't be written: %s: %s", type(error).__name__, error)

    def _has_report_of_step(self, step: int) -> bool:
        """Return whether the report in the run folder is about this step."""
        from drawloom.components.storage.durable_files import does_file_begin_with

        beginning = f"<!doctype html><!-- {format_step_comment(step)} -->"
        return does_file_begin_with(self.report_path, beginning.encode())

    @property
    def report_path(self) -> Path:
        """The report's path in the run folder."""
        return self.folder.folder / REPORT


def format_step_comment(step: int) -> str:
    """Return the comment for a report's step."""
    return f"after step {step}"
