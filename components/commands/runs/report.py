"""write one HTML report about runs: curves, events, checkpoints, samples and drawings"""

from collections.abc import Sequence
from pathlib import Path

from drawloom.components.commands._options import check_writable_file, write_file
from drawloom.components.commands._recipes import Pipeline, require_microbatches
from drawloom.components.report.drawings import draw_schedule_svg
from drawloom.components.report.html import REPORT
from drawloom.components.report.page import render_page
from drawloom.components.report.run_record import Drawings, find_run_folders, make_unique_run_names, read_run_record
from drawloom.components.storage.byte_size import format_decimal_byte_size
from drawloom.graph.cli.command import (
    Command,
    Project,
    Recipe,
    RecipeError,
    Result,
    UserError,
    argument,
    command,
    format_problems,
    option,
    output,
    output_class,
    print_escaped_text,
)
from drawloom.graph.recipe.lockfile import LOCK

MAX_DRAWN_RUNS = 8
"""Maximum runs of a report with graphs and schedules: drawing takes a second for a run."""


@output_class
class ReportResult(Result):
    """An HTML report."""

    path: Path = output("written file")
    bytes: int = output("size of the file")
    runs: Sequence[str] = output("names of the runs in the report")

    def render(self, format: str) -> str:
        """Return one line with size and path."""
        return f"report of {format_decimal_byte_size(self.bytes)} in {self.path}"


@command
class ReportCommand(Command):
    """A report about runs."""

    folders: Sequence[Path] = argument("run folders, or folders of runs, such as a sweep's", metavar="FOLDER")
    to: Path | None = option(
        f"file to write (default: {REPORT} in the run folder, or in the current folder for several runs)",
        metavar="FILE",
        check=check_writable_file,
    )

    def run(self, project: Project) -> ReportResult:
        runs_by_folder = {folder: [*find_run_folders(folder)] if folder.is_dir() else [] for folder in self.folders}
        folders = [*dict.fromkeys(run for runs in runs_by_folder.values() for run in runs)]
        others = [str(folder) for folder, runs in runs_by_folder.items() if not runs]
        if not folders:
            raise UserError(f"{others[0]} is not a run folder; give one, such as runs/first_run", 2)
        if others:  # as after a failed start
            print_escaped_text(f"left out, because they have no run: {' '.join(others)}", "stderr")
        runs = [
            read_run_record(
                folder, name, _draw_recipe(project, folder) if len(folders) <= MAX_DRAWN_RUNS else Drawings()
            )
            for folder, name in zip(folders, make_unique_run_names(folders), strict=True)
        ]
        target = self.to or (folders[0] / REPORT if len(folders) == 1 else Path(REPORT))
        content = render_page(runs).encode()
        write_file(target, content)
        return ReportResult(target, len(content), [run.name for run in runs])


def _draw_recipe(project: Project, folder: Path) -> Drawings:
    """Draw the run's recipe, or return why this drawloom version cannot read it (its components may be gone)."""
    if not (folder / LOCK).is_file():
        return Drawings()
    try:
        recipe = Recipe.load(folder, project=project)
        pipeline = Pipeline.from_recipe(recipe)
        microbatches = require_microbatches(pipeline.microbatches)
        schedule = draw_schedule_svg(pipeline.use, pipeline.schedule, pipeline.ranks, microbatches)
        return Drawings(recipe.draw("svg"), recipe.draw("svg", step=True), schedule)
    except RecipeError as error:
        return Drawings(missing=format_problems(error.problems))
    except UserError as error:
        return Drawings(missing=str(error))
