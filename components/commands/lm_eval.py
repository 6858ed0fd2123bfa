"""evaluate a run on lm-eval-harness tasks"""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drawloom.components.commands._options import (
    add_batch_size_option,
    convert_write_errors,
    make_integer_parser,
    parse_writable_path,
)
from drawloom.components.commands._trained import add_run_and_checkpoint_arguments, open_trained_run
from drawloom.components.data.sources.files import import_optional_package
from drawloom.components.ports.corpus import Tokenizer
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.pipeline import Predictor
from drawloom.components.storage.durable_files import replace_file
from drawloom.graph import UserError
from drawloom.graph.cli.result import Result, dump_json, output, output_class
from drawloom.graph.project import Project


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line arguments."""
    add_run_and_checkpoint_arguments(parser)
    parser.add_argument("--tasks", nargs="+", metavar="TASK", required=True, help="tasks, or groups of tasks, by name")
    parser.add_argument(
        "--include",
        action="append",
        type=Path,
        metavar="DIR",
        help="also use the tasks in this folder, in YAML; may be repeated",
    )
    parser.add_argument(
        "--fewshot",
        type=make_integer_parser(0),
        metavar="N",
        help="examples before each question (default: the task's)",
    )
    parser.add_argument(
        "--limit", type=make_integer_parser(), metavar="N", help="ask only the first N questions of each task"
    )
    parser.add_argument(
        "--context",
        type=make_integer_parser(),
        default=1024,
        metavar="N",
        help="most tokens the model sees (default: 1024)",
    )
    add_batch_size_option(parser, "--rows", "texts")
    parser.add_argument(
        "--to", type=parse_writable_path, metavar="FILE", help="write all results to this file, as JSON"
    )


@output_class
class LmEvalResult(Result):
    """Metrics of tasks."""

    run_folder: Path | str = output("run folder, or the URL of its mirror")
    step: int = output("step of the checkpoint")
    results: Mapping[str, Mapping[str, Any]] = output(
        "values by task; a key is a metric and a filter, such as acc,none"
    )

    def render(self, format: str) -> str:
        """Return a line per task and metric; text is the only `format`."""
        return "\n".join([f"{self.run_folder}, step {self.step}:", *_format_metric_lines(self.results)])


def main(options: argparse.Namespace, project: Project) -> LmEvalResult:
    """Evaluate the run on every task."""
    harness = import_optional_package("lm_eval", "pip install 'drawloom[lm-eval]'")
    from lm_eval.tasks import TaskManager

    from drawloom.components.commands._lm_eval_model import RunModel

    manager = TaskManager(include_path=[str(path) for path in options.include or ()] or None)
    if unknown := [name for name in options.tasks if not manager.match_tasks([name])]:
        raise UserError(f"--tasks: no task is called {unknown[0]!r}; `lm-eval ls tasks` shows those of the package", 2)
    with open_trained_run(project, options, Predictor, Tokenizer, Mesh) as (run, step):
        pipeline = run.get(Mesh).pipeline_group
        model = RunModel(run.get(Predictor), run.get(Tokenizer), pipeline, options.context, options.rows)
        try:
            results = harness.simple_evaluate(
                model, tasks=options.tasks, num_fewshot=options.fewshot, limit=options.limit, task_manager=manager
            )
        except ConnectionError as error:
            hint = "try again with a network, or give tasks whose data is on this machine by --include"
            raise UserError(f"--tasks: the data of a task can't be downloaded ({error}); {hint}") from error
    if options.to is not None:
        summary = {name: value for name, value in results.items() if name != "samples"}
        # The harness puts functions into it, and NaN.
        plain = json.loads(json.dumps({"step": step, **summary}, default=str), parse_constant=lambda _name: None)
        with convert_write_errors(options.to):
            replace_file(options.to, f"{dump_json(plain)}\n".encode())
    return LmEvalResult(options.run_folder, step, results["results"])


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
