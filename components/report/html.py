"""A final task that writes the report of the run."""

import logging
import time
from pathlib import Path

from drawloom.components.distributed.rank_errors import run_on_rank0
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.pipeline import Schedule
from drawloom.components.ports.run import Batching, RunFolder
from drawloom.components.report.drawings import draw_schedule
from drawloom.components.report.ettr import TIME, ettr
from drawloom.components.report.page import page
from drawloom.components.report.run_record import REPORT, Drawings, read_run
from drawloom.components.storage.durable_files import replace_file
from drawloom.components.storage.regular_file import regular_file
from drawloom.graph import Every, ResolvedRecipe, component

log = logging.getLogger("drawloom.run")


@component(impact="safe")
class HtmlReport:
    """
    Writes `report.html` in the run folder: curves, events, checkpoints, the sample and drawings of the run.

    `drawloom report` writes the same of any run, or of several. A report that can't be written is a warning. With it,
    the share of the time that went into steps which the run has kept (its ETTR) is logged.
    """

    folder: RunFolder
    mesh: Mesh
    recipe: ResolvedRecipe
    schedules: Every[Schedule]
    batching: Every[Batching]

    def is_finished(self, step: int) -> bool:
        """Whether rank 0 finds a report of this step; equal on all ranks."""
        return bool(run_on_rank0(self.mesh.world, lambda: self._holds(step)))

    def finish(self, step: int) -> None:
        """Write the report on rank 0."""
        if self.mesh.world.rank == 0:
            try:
                self._write(step)
            except Exception as error:  # the run is what counts
                log.warning("the report can't be written: %s: %s", type(error).__name__, error)

    def _write(self, step: int) -> None:
        folder = self.folder.folder
        run = read_run(folder, folder.resolve().name, self._drawings(step))
        run.log.end(time.strftime(TIME), step)
        replace_file(self._target, page([run], _heading(step)).encode())
        log.info("report in %s", self._target)
        if (effective := ettr(run.log, run.metrics)) is not None:
            log.info("time    %s", effective)

    def _drawings(self, step: int) -> Drawings:
        pictures = [
            draw_schedule(
                type(schedule).__module__.rpartition(".")[2],
                schedule,
                self.mesh.sizes.pipeline,
                len(batching.positions(step)),
            )
            for schedule, batching in zip(self.schedules.values(), self.batching.values(), strict=False)
        ]
        return Drawings(self.recipe.draw(False), self.recipe.draw(True), "\n".join(pictures))

    def _holds(self, step: int) -> bool:
        beginning = f"<!doctype html><!-- {_heading(step)} -->".encode()
        try:
            with regular_file(self._target) as file:
                return file.read(0, min(file.size, len(beginning))) == beginning
        except OSError:
            return False

    @property
    def _target(self) -> Path:
        return self.folder.folder / REPORT


def _heading(step: int) -> str:
    return f"after step {step}"
