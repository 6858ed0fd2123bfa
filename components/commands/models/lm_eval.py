"""evaluate a run on lm-eval-harness tasks"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from drawloom import at_least
from drawloom.components.commands._options import check_writable_file, write_file
from drawloom.components.commands._trained import CheckpointCommand, CheckpointResult
from drawloom.components.data.sources.files import import_optional_package
from drawloom.graph.cli.command import Count, Project, UserError, command, option, output, output_class
from drawloom.graph.cli.json_text import dump_json
from drawloom.ports import Executor, Mesh, Tokenizer


@output_class
class LmEvalResult(CheckpointResult):
    """Metrics of tasks."""

    results: Mapping[str, Mapping[str, Any]] = output(
        "values by task; a key is a metric and a filter, such as acc,none"
    )

    def render(self, format: str) -> str:
        """Return a line per task and metric; text is the only `format`."""
        return "\n".join([f"{self.origin}:", *_format_metric_lines(self.results)])


@command
class LmEvalCommand(CheckpointCommand):
    """An evaluation on tasks."""

    tasks: Sequence[str] = option("tasks, or groups of tasks, by name", metavar="TASK", nargs="+")
    include: Sequence[Path] = option(
        "also use the tasks in this folder, in YAML; may be repeated", default=(), metavar="DIR"
    )
    fewshot: int | None = option("examples before each question (default: the task's)", check=at_least(0))
    limit: Count | None = option("ask only the first N questions of each task")
    context: Count = option("most tokens the model sees", default=1024)
    rows: Count = option("texts per batch", default=8)
    to: Path | None = option("write all results to this file, as JSON", metavar="FILE", check=check_writable_file)

    def run(self, project: Project) -> LmEvalResult:
        harness = import_optional_package("lm_eval", "pip install 'drawloom[lm-eval]'")
        from lm_eval.tasks import TaskManager

        from drawloom.components.commands.models._lm_eval_model import RunModel

        manager = TaskManager(include_path=[str(path) for path in self.include] or None)
        if unknown := [name for name in self.tasks if not manager.match_tasks([name])]:
            hint = "`lm-eval ls tasks` shows the package's tasks"
            raise UserError(f"--tasks: no task is called {unknown[0]!r}; {hint}", 2)
        with self.open_run(project, Executor, Tokenizer, Mesh) as run:
            pipeline = run.nodes.get(Mesh).pipeline_group
            model = RunModel(run.nodes.get(Executor), run.nodes.get(Tokenizer), pipeline, self.context, self.rows)
            try:
                results = harness.simple_evaluate(
                    model, tasks=[*self.tasks], num_fewshot=self.fewshot, limit=self.limit, task_manager=manager
                )
            except ConnectionError as error:
                hint = "try again with a network, or give tasks whose data is on this machine by --include"
                raise UserError(f"--tasks: the data of a task can't be downloaded ({error}); {hint}") from error
        if self.to is not None:
            summary = {name: value for name, value in results.items() if name != "samples"}
            # The harness puts functions into it.
            plain = json.loads(json.dumps({"step": run.step, **summary}, default=str))
            write_file(self.to, f"{dump_json(plain)}\n".encode())
        return LmEvalResult(self.run_folder, run.step, results["results"])


def _format_metric_lines(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line per task and metric from results with keys such as acc,none (name and filter)."""
    for task, values in results.items():
        for key, value in values.items():
            metric, _, rest = key.partition(",")
            if not isinstance(value, int | float) or not rest or metric.endswith("_stderr"):
                continue
            error = values.get(f"{metric}_stderr,{rest}")
            kind = "" if rest == "none" else f" ({rest})"
            yield f"{task}  {metric}{kind} {value:.4f}" + (f" ± {error:.4f}" if isinstance(error, float) else "")
