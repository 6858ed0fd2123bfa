"""Final task: the run's report."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from drawloom import Every, ResolvedRecipe, component
from drawloom.ports import Batching, Mesh, RunFolder, Schedule, run_log

if TYPE_CHECKING:
    from drawloom.components.report.run_record import Drawings

REPORT = "report.html"
HEADING = "after step %d"
"""Comment in the file's first line."""


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
        from drawloom.components.distributed.rank_errors import run_on_rank0
        from drawloom.components.storage.durable_files import does_file_begin_with

        beginning = f"<!doctype html><!-- {HEADING % step} -->".encode()
        return bool(run_on_rank0(self.mesh.world, lambda: does_file_begin_with(self._report_path, beginning)))

    def run_after_training(self, step: int) -> None:
        """Write the report on rank 0."""
        if self.mesh.world.rank == 0:
            try:
                self._write_report(step)
            except Exception as error:  # a failed report must not fail the run
                run_log.warning("the report can't be written: %s: %s", type(error).__name__, error)

    def _write_report(self, step: int) -> None:
        """Write the report, and log its path and the ETTR."""
        # a run needs the report's contents at its end alone
        from drawloom.components.report.ettr import TIME_FORMAT, compute_ettr
        from drawloom.components.report.page import render_page
        from drawloom.components.report.run_record import read_run_record
        from drawloom.components.storage.durable_files import replace_file

        folder = self.folder.folder
        run = read_run_record(folder, folder.resolve().name, self._draw_run_or_explain(step))
        run.log.add_training_end(time.strftime(TIME_FORMAT), step)
        replace_file(self._report_path, render_page([run], HEADING % step).encode())
        run_log.info("report in %s", self._report_path)
        if (ratio := compute_ettr(run.log, run.metrics)) is not None:
            run_log.info("time    %s", ratio)

    def _draw_run_or_explain(self, step: int) -> "Drawings":
        """Draw the run's graph, step and schedule, or return why they can't be drawn."""
        from drawloom.components.report.drawings import draw_schedule_svg
        from drawloom.components.report.run_record import Drawings

        pictures = [
            draw_schedule_svg(
                type(schedule).__module__.rpartition(".")[2],
                schedule,
                self.mesh.sizes.pipeline,
                len(batching.microbatch_row_positions(step)),
            )
            for schedule, batching in zip(self.schedules.values(), self.batching.values(), strict=False)
        ]
        return Drawings(self.recipe.draw(False), self.recipe.draw(True), "\n".join(pictures))

    @property
    def _report_path(self) -> Path:
        """The report's path in the run folder."""
        return self.folder.folder / REPORT
