"""A run folder's parts for its report: metrics, events, checkpoints, recipe and sample; any may be missing."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import attrs

from drawloom import RecipeError, UserError
from drawloom.components.checkpoint.manifest import FOLDER, Manifest, list_checkpoints, step_of_checkpoint
from drawloom.components.checkpoint.verification import read_manifest_if_sizes_match
from drawloom.components.report.events import RunLog, read_log
from drawloom.components.report.metrics import METRICS, Metrics, read_metrics
from drawloom.components.storage.regular_file import open_untrusted_file
from drawloom.components.storage.step_log import StepLine, parse_step_lines
from drawloom.graph.inspect.serialize import flatten_inline_nodes, serialize_recipe
from drawloom.graph.recipe.lockfile import LOCK
from drawloom.graph.recipe.merged import MergedRecipe
from drawloom.graph.toml.emit import dump_toml
from drawloom.graph.toml.parsing import parse

SAMPLE, PLAN, ROLLOUTS = "sample.txt", "plan.txt", "rollouts.jsonl"
MAX_SAMPLE_BYTES, MAX_RECIPE_BYTES = 20_000, 2**20
MAX_CHECKPOINTS = 100
OWN_SETTINGS = ("run.name", "run.folder")
"""Settings in which all runs differ."""


@attrs.frozen
class Drawings:
    """SVG documents for a run's graph, step and schedule; `missing` is the reason why the graph is empty."""

    graph: str = ""
    step: str = ""
    schedule: str = ""
    missing: str = ""


@attrs.frozen(eq=False)
class RunRecord:
    """Run record, read from its folder; the name is unique in a report."""

    name: str
    metrics: Metrics
    log: RunLog
    checkpoints: Sequence[tuple[int, Manifest | None]]
    recipe: str
    sample: str
    drawings: Drawings = attrs.field(factory=Drawings)
    plan: str = ""
    rollouts: StepLine | None = None  # the last recorded step with completions


def read_run_record(folder: Path, name: str, drawings: Drawings) -> RunRecord:
    """Read a run folder, which may be in use. Raises UserError if a file can't be read."""
    checkpoints = [
        (step_of_checkpoint(path), read_manifest_if_sizes_match(path))
        for path in list_checkpoints(folder / FOLDER)[-MAX_CHECKPOINTS:]
    ]
    return RunRecord(
        name=name,
        metrics=read_metrics(folder),
        log=read_log(folder),
        checkpoints=checkpoints,
        recipe=_read_file_beginning(folder / LOCK, MAX_RECIPE_BYTES),
        sample=_read_file_beginning(folder / SAMPLE, MAX_SAMPLE_BYTES),
        drawings=drawings,
        plan=_read_file_beginning(folder / PLAN, MAX_SAMPLE_BYTES),
        rollouts=_read_last_line(folder / ROLLOUTS),
    )


def check_is_run(folder: Path) -> None:
    """Raise UserError if a folder contains neither a recipe nor metrics."""
    if not any((folder / file).exists() for file in (LOCK, METRICS)):
        raise UserError(f"{folder} is not a run folder; give one, such as runs/first_run", 2)


def make_unique_run_names(folders: Sequence[Path]) -> list[str]:
    """Return a unique name for every run folder: the folder's name, or its path if two folders have the same name."""
    names = [folder.resolve().name for folder in folders]
    return [str(folder) if names.count(name) > 1 else name for folder, name in zip(folders, names, strict=True)]


def list_differing_settings(recipes: Iterable[Mapping[str, str]]) -> list[str]:
    """Return the keys whose values differ between the settings of recipes, or are missing in some."""
    recipes = list(recipes)
    keys = dict.fromkeys(key for settings in recipes for key in settings)
    return [key for key in keys if len({settings.get(key) for settings in recipes}) > 1]


def parse_recipe_settings(text: str) -> dict[str, str]:
    """
    Return the values of a resolved recipe as TOML, by `node.key`, without OWN_SETTINGS.

    Empty for a recipe that can't be read.
    """
    try:
        nodes = flatten_inline_nodes(serialize_recipe(MergedRecipe.from_values(parse(text))))
    except (RecipeError, ValueError):
        return {}
    settings = {f"{name}.{key}": dump_toml(value) for name, node in nodes.items() for key, value in node.items()}
    return {key: value for key, value in settings.items() if key not in OWN_SETTINGS}


def _read_last_line(path: Path) -> StepLine | None:
    """Return a step log's last line; None if the file is missing, or its end has no readable line."""
    lines, _ = parse_step_lines(_read_part(path, MAX_RECIPE_BYTES, from_end=True))
    return lines[-1] if lines else None


def _read_file_beginning(path: Path, max_bytes: int) -> str:
    """Read a file's beginning; "" if the file is missing."""
    return _read_part(path, max_bytes).decode("utf-8", "replace")


def _read_part(path: Path, max_bytes: int, from_end: bool = False) -> bytes:
    """Read a file's beginning or end; nothing if the file is missing."""
    if not path.exists() and not path.is_symlink():
        return b""
    with open_untrusted_file(path) as file:
        return file.read(max(0, file.size - max_bytes) if from_end else 0, min(file.size, max_bytes))
