"""A run folder's recipe.lock.toml, with the changes since the run began, copied files, and versions."""

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from drawloom import RecipeError, ResolvedRecipe, UserError
from drawloom.components.storage.durable_files import create_folder_unless_link, open_untrusted_file, replace_file
from drawloom.graph.recipe.lockfile import LOCK, RecipeChange
from drawloom.ports import FILES, EnvironmentSource, ReadsFiles, run_log

ENVIRONMENT = "environment.json"
"""File in the run's `log` folder: versions and choices of the newest process of rank 0, for `drawloom why`."""

REMEDY = "remove it, or use another run name"

INITIAL_FILES = {LOCK, FILES, "run.lock", "log"}
"""Names in a run folder before the first step; other files are empty until then."""


def write_run_records(
    folder: Path,
    recipe: ResolvedRecipe,
    changes: list[RecipeChange],
    readers: Mapping[str, ReadsFiles],
    environments: Mapping[str, EnvironmentSource],
) -> None:
    """Write the recipe, copies of the files it names, and the versions."""
    update_lock_and_log_changes(folder, recipe, changes)
    for node, reader in readers.items():
        for setting, paths in reader.list_input_files().items():
            copy_files(create_folder_unless_link(create_folder_unless_link(folder / FILES) / node) / setting, paths)
    content = json.dumps(collect_versions_and_choices(environments), indent=1).encode()
    path = create_folder_unless_link(folder / "log") / ENVIRONMENT
    if not path.is_file() or path.read_bytes() != content:
        replace_file(path, content)


def collect_versions_and_choices(sources: Mapping[str, EnvironmentSource]) -> dict[str, str]:
    """Return versions, and the choices of nodes by `node.name`."""
    package = __name__.partition(".")[0]
    versions = {
        package: str(sys.modules[package].__version__),
        "python": platform.python_version(),
        "machine": platform.platform(),
    }
    chosen = {
        f"{node}.{key}": value
        for node, source in sources.items()
        for key, value in source.list_versions_and_choices().items()
    }
    return versions | chosen


def list_recipe_changes_if_safe(folder: Path, recipe: ResolvedRecipe) -> list[RecipeChange]:
    """
    Return the changes since the folder's recipe.lock.toml; none if the file does not exist.

    Raises UserError if a change is not safe or the file can't be read, unless changes are accepted.
    """
    path = folder / LOCK
    if not path.exists():
        return []
    with open_untrusted_file(path, REMEDY) as file:
        recorded = file.read(0, file.size)
    try:
        changes = recipe.changes(recorded.decode("utf-8"))
    except (RecipeError, ValueError) as error:
        if recipe.accept_changes:
            run_log.warning("%s can't be read and is replaced: %s", path, error)
            return []
        raise UserError(
            f"{path} can't be read, so this recipe can't be compared with it: {error}; "
            "to continue anyway, add --accept-changes",
            exit_code=2,
        ) from error
    if not recipe.accept_changes and any(change.impact != "safe" for change in changes):
        raise UserError(_describe_refusal(folder, changes), exit_code=2)
    return changes


def has_step_results(folder: Path) -> bool:
    """Return whether a folder contains a step's results; without results, another recipe may use the folder."""
    results = (path for path in folder.iterdir() if path.name not in INITIAL_FILES)
    return any(any(path.iterdir()) if path.is_dir() else path.lstat().st_size for path in results)


def update_lock_and_log_changes(folder: Path, recipe: ResolvedRecipe, changes: list[RecipeChange]) -> None:
    """Write recipe.lock.toml unless it is up to date, and log the changes."""
    for change in changes:
        run_log.info("%s: the recipe changed: %s", folder, change)
    path, text = folder / LOCK, recipe.lock.encode()
    if _read_file_content(path) != text:
        replace_file(path, text)


def copy_files(folder: Path, paths: Sequence[Path]) -> None:
    """
    Copy files into the run folder, to make the run independent of the originals.

    A file in a folder beside the first file stays in such a folder.
    """
    create_folder_unless_link(folder)
    for path in paths:
        inside = path.parent.parent == paths[0].parent
        parent = create_folder_unless_link(folder / path.parent.name) if inside else folder
        content, copy = path.read_bytes(), parent / path.name
        if _read_file_content(copy) != content:
            replace_file(copy, content)


def _read_file_content(path: Path) -> bytes | None:
    """Return the content of a file in the run folder, as bytes; None if the file is missing."""
    # the folder may come from somebody else, with a link or a device under the name
    if not path.exists():
        return None
    with open_untrusted_file(path, REMEDY) as file:
        return file.read(0, file.size)


def _describe_refusal(folder: Path, changes: list[RecipeChange]) -> str:
    """List the changes for which a folder's run can't continue, and the remedy."""
    lines = [f"{folder} holds a run of another recipe; the differences are:"]
    lines += [f"  {change}" for change in changes]
    if any(change.impact == "incompatible" for change in changes):
        lines += ["the saved state does not fit incompatible changes; undo them, or use another run name"]
    else:
        lines += ["only safe changes are allowed; use another run name, or add --accept-changes"]
    return "\n".join(lines)
