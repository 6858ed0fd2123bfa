"""What a run folder holds, for its report: metrics, events, checkpoints, recipe and sample; each may be missing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from drawloom.components.checkpoint.manifest import FOLDER, Manifest, committed, quick_check, step_of
from drawloom.components.report.events import RunLog, read_log
from drawloom.components.report.metrics import METRICS, Metrics, read_metrics
from drawloom.components.storage.regular_file import open_regular_file
from drawloom.graph import RecipeError, UserError
from drawloom.graph.inspect.serialize import flatten, serialize_recipe
from drawloom.graph.recipe.lockfile import LOCK
from drawloom.graph.recipe.merged import MergedRecipe
from drawloom.graph.toml.emit import dumps
from drawloom.graph.toml.parsing import parse

SAMPLE, PLAN, REPORT = "sample.txt", "plan.txt", "report.html"
LONGEST_SAMPLE, LONGEST_RECIPE = 20_000, 2**20  # bytes
MOST_CHECKPOINTS = 100


@attrs.frozen
class Drawings:
    """SVG documents of a run's graph, of its step and of its schedule; `missing` says why one is empty."""

    graph: str = ""
    step: str = ""
    schedule: str = ""
    missing: str = ""


@attrs.frozen(eq=False)
class RunRecord:
    """A run as its folder tells it; the name is unique in a report."""

    name: str
    metrics: Metrics
    log: RunLog
    checkpoints: Sequence[tuple[int, Manifest | None]]
    recipe: str
    sample: str
    drawings: Drawings = attrs.field(factory=Drawings)
    plan: str = ""


def read_run(folder: Path, name: str, drawings: Drawings) -> RunRecord:
    """The record of a run folder, which may be in use; UserError if one of its files can't be read."""
    checkpoints = [(step_of(path), quick_check(path)) for path in committed(folder / FOLDER)[-MOST_CHECKPOINTS:]]
    return RunRecord(
        name=name,
        metrics=read_metrics(folder),
        log=read_log(folder),
        checkpoints=checkpoints,
        recipe=_text(folder / LOCK, LONGEST_RECIPE),
        sample=_text(folder / SAMPLE, LONGEST_SAMPLE),
        drawings=drawings,
        plan=_text(folder / PLAN, LONGEST_SAMPLE),
    )


def check_is_run(folder: Path) -> None:
    """Raise a UserError if a folder holds neither a recipe nor metrics of a run."""
    if not any((folder / file).exists() for file in (LOCK, METRICS)):
        raise UserError(f"{folder} is not a run folder; give one, such as runs/first_run", 2)


def names_of(folders: Sequence[Path]) -> list[str]:
    """A name for each run folder: its own, or its path if two have the same."""
    own = [folder.resolve().name for folder in folders]
    return [str(folder) if own.count(name) > 1 else name for folder, name in zip(folders, own, strict=True)]


def differences(recipes: Sequence[str]) -> list[tuple[str, list[str]]]:
    """
    What differs between the resolved recipes of runs: `node.key`, and the value of each run, "" where it has none.

    A recipe that can't be read counts as empty.
    """
    values = [_values(text) for text in recipes]
    keys = dict.fromkeys(key for each in values for key in each)
    rows = [(key, [each.get(key, "") for each in values]) for key in keys]
    return [(key, row) for key, row in rows if len(set(row)) > 1]


def _values(text: str) -> dict[str, str]:
    try:
        nodes: Mapping[str, Mapping[str, Any]] = flatten(serialize_recipe(MergedRecipe.of(parse(text))))
    except (RecipeError, ValueError):
        return {}
    return {f"{name}.{key}": dumps(value) for name, node in nodes.items() for key, value in node.items()}


def _text(path: Path, limit: int) -> str:
    """The beginning of a file, "" if it is missing."""
    if not path.exists() and not path.is_symlink():
        return ""
    with open_regular_file(path) as file:
        return file.read(0, min(file.size, limit)).decode("utf-8", "replace")
