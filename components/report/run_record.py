"""
A run folder's parts for its report: metrics, events, checkpoints, recipe and sample; any may be missing.

A table of the runs below a folder has state, progress, losses, speed, and the settings in which their recipes differ.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from drawloom import RecipeError, UserError
from drawloom.components.checkpoint.commit import FOLDER, Manifest, list_checkpoints, step_of_checkpoint
from drawloom.components.checkpoint.reader import read_manifest_if_sizes_match
from drawloom.components.report.ettr import compute_ettr, sum_recovery_seconds
from drawloom.components.report.events import RunLog, read_log
from drawloom.components.report.metrics import METRICS, Metrics, read_metrics
from drawloom.components.run.locks import is_lock_holder_alive
from drawloom.components.storage.durable_files import open_untrusted_file
from drawloom.components.storage.step_log import StepLine, parse_step_lines
from drawloom.graph.cli.command import output, output_class
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


State = Literal["finished", "stopped", "interrupted", "failed", "running", "unreadable", "unknown"]
"""`interrupted`: killed, or failed with an error that only the terminal shows. `unknown`: the run has no log."""

END_STATES: dict[str, State] = {"ended": "finished", "stopped": "stopped", "error": "failed"}


@output_class
class RunRow:
    """A run in the table; None for an unknown value. `best` is the lowest validation loss."""

    run: str = output("path below the folder, or the folder's name")
    state: State = output("state of the run")
    step: int | None = output("last step", default=None)
    steps: int | None = output("steps of the whole run", default=None)
    loss: float | None = output("training loss of the last step", default=None)
    best: float | None = output("lowest validation loss", default=None)
    best_step: int | None = output("step with the lowest validation loss", default=None)
    tokens: int | None = output("tokens of all steps", default=None)
    tokens_per_second: float | None = output("tokens by the seconds of the steps alone", default=None)
    ettr: float | None = output("effective training time ratio: productive fraction of the time", default=None)
    recovery_seconds: dict[str, float] = output(
        "seconds lost with survived losses of ranks, by part, such as detect", default=attrs.Factory(dict)
    )
    differs: dict[str, str] = output("settings in which the runs differ, as TOML", default=attrs.Factory(dict))
    problem: str = output("reason why the run can't be read, or an empty string", default="")


COLUMNS = ("run", "state", "step", "steps", "loss", "best", "best_step", "tokens", "tokens_per_second", "ettr")


def find_run_folders(folder: Path) -> Iterator[Path]:
    """
    Yield the run folders in a folder and in its subfolders, by name; a run folder is not searched.

    A folder that several links lead to is searched once, under its own name if that is below `folder`.
    """
    paths, links, seen = list[Path](), [folder], set[Path]()
    while links:
        for name, subfolders, _ in os.walk(links.pop(0)):
            path = Path(name)
            is_run = any((path / file).is_file() for file in (LOCK, METRICS))
            is_new = path.resolve() not in seen
            seen.add(path.resolve())
            paths += [path] if is_run and is_new else []
            # os.walk enters the folders that are left here, but no links
            subfolders[:] = sorted(sub for sub in subfolders if is_new and not is_run and not sub.startswith("."))
            links += [path / sub for sub in subfolders if (path / sub).is_symlink()]
    yield from sorted(paths)


def read_run_rows(folder: Path) -> list[RunRow]:
    """Return a row for every run in a folder. A run that can't be read has the state `unreadable`, and a problem."""
    records: list[tuple[Path, str, RunRecord | UserError]] = []
    for path in find_run_folders(folder):
        name = str(path.relative_to(folder)) if path != folder else folder.resolve().name
        try:
            records.append((path, name, read_run_record(path, name, Drawings())))
        except UserError as error:
            records.append((path, name, error))
    settings = [parse_recipe_settings(record.recipe) if isinstance(record, RunRecord) else {} for *_, record in records]
    differing = list_differing_settings(known for known in settings if known)
    return [
        RunRow(name, "unreadable", problem=str(record))
        if isinstance(record, UserError)
        else _make_run_row(
            name, record, determine_run_state(path, record.log), {key: known[key] for key in differing if key in known}
        )
        for (path, name, record), known in zip(records, settings, strict=True)
    ]


def determine_run_state(folder: Path, log: RunLog) -> State:
    """Return a run's state, from its log and from the process that holds its folder."""
    if log.running:
        return "running" if is_lock_holder_alive(folder) else "interrupted"
    kinds = [event.kind for event in log.events if event.kind in END_STATES]
    return END_STATES[kinds[-1]] if kinds else "unknown"


def is_run_in_use(folder: Path) -> bool:
    """Return whether the process that last locked a run folder still exists."""
    return is_lock_holder_alive(folder)


def sort_run_rows(rows: Sequence[RunRow], key: str, *, reverse: bool = False) -> list[RunRow]:
    """
    Return the rows in the order of a column, or of a setting such as `optimizer.lr`; rows without a value come last.

    Raises UserError if the runs have no such column, and do not differ in such a setting.
    """
    keys = [*COLUMNS, *list_differing_setting_keys(rows)]
    if key not in keys:
        raise UserError(f"--sort {key}: there is no such column; write one of {', '.join(keys)}", 2)
    values = {row.run: getattr(row, key) if key in COLUMNS else row.differs.get(key) for row in rows}
    known = [row for row in rows if values[row.run] is not None]
    unknown = [row for row in rows if values[row.run] is None]
    return [*sorted(known, key=lambda row: _make_numbers_first_sort_key(values[row.run]), reverse=reverse), *unknown]


def list_differing_setting_keys(rows: Sequence[RunRow]) -> list[str]:
    """Return the keys of the settings in which the runs' recipes differ."""
    return list(dict.fromkeys(key for row in rows for key in row.differs))


def _make_run_row(name: str, record: RunRecord, state: State, differs: dict[str, str]) -> RunRow:
    """Return a run's row from its record."""
    metrics = record.metrics
    best = metrics.smallest_value_and_step("validation_loss")
    tokens = float(metrics.total_tokens_by_step[-1]) if metrics.steps else 0.0
    seconds = float(metrics.total_seconds_by_step[-1]) if metrics.steps else 0.0
    ettr = compute_ettr(record.log, metrics)
    return RunRow(
        run=name,
        state=state,
        step=max(metrics.steps, default=0),
        steps=record.log.total or None,
        loss=metrics.last_value("loss"),
        best=best[0] if best else None,
        best_step=best[1] if best else None,
        tokens=round(tokens) if tokens else None,
        tokens_per_second=tokens / seconds if seconds > 0 else None,
        ettr=ettr.productive_time_fraction if ettr else None,
        recovery_seconds=sum_recovery_seconds(metrics),
        differs=differs,
    )


def _make_numbers_first_sort_key(value: Any) -> tuple[bool, float, str]:
    """Return a key that orders numbers, also if a setting's text is one, before other texts."""
    try:
        return False, float(value), ""
    except ValueError:
        return True, 0.0, str(value)
