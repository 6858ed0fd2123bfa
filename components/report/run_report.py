"""A run's own report, written at its end."""

import logging
import time

from drawloom.components.report.drawings import draw_schedule_svg
from drawloom.components.report.ettr import TIME_FORMAT, compute_ettr
from drawloom.components.report.html import HtmlReport, format_step_comment
from drawloom.components.report.page import render_page
from drawloom.components.report.run_record import Drawings, read_run_record
from drawloom.components.storage.durable_files import replace_file

log = logging.getLogger("drawloom.run")


def write_report(task: HtmlReport, step: int) -> None:
    """Write the report with drawings of the run's graph, step and schedules, and log its path and the ETTR."""
    pictures = [
        draw_schedule_svg(
            type(schedule).__module__.rpartition(".")[2],
            schedule,
            task.mesh.sizes.pipeline,
            len(batching.microbatch_row_positions(step)),
        )
        for schedule, batching in zip(task.schedules.values(), task.batching.values(), strict=False)
    ]
    drawings = Drawings(task.recipe.draw(False), task.recipe.draw(True), "\n".join(pictures))
    folder = task.folder.folder
    run = read_run_record(folder, folder.resolve().name, drawings)
    run.log.add_training_end(time.strftime(TIME_FORMAT), step)
    replace_file(task.report_path, render_page([run], format_step_comment(step)).encode())
    log.info("report in %s", task.report_path)
    if (ratio := compute_ettr(run.log, run.metrics)) is not None:
        log.info("time    %s", ratio)
