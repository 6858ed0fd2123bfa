"""The run folder: locked by one run at a time (run.lock), and bound to one recipe (recipe.lock.toml)."""

import json
import logging
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from drawloom import Every, RecipeError, ResolvedRecipe, UserError, component, internal
from drawloom.components.distributed.rank_errors import run_on_rank0
from drawloom.components.storage.durable_files import replace_file
from drawloom.components.storage.regular_file import create_folder_unless_link, open_untrusted_file
from drawloom.graph.recipe.lockfile import LOCK, RecipeChange
from drawloom.ports import FILES, EnvironmentSource, Mesh, ReadsFiles, RunInfo

if TYPE_CHECKING:
    from drawloom.components.run.locks import FolderLock

log = logging.getLogger("drawloom.run")

ENVIRONMENT = "environment.json"
"""File in the run's `log` folder: versions and choices of the newest process of rank 0, for `drawloom why`."""

REMEDY = "remove it, or use another run name"

INITIAL_FILES = {LOCK, FILES, "run.lock", "log"}
"""Names in a run folder before the first step; other files are empty until then."""


@component(impact="safe")
class LockedFolder:
    """Run folder, locked by rank 0 while the run is open."""

    job: RunInfo
    mesh: Mesh
    recipe: ResolvedRecipe
    readers: Every[ReadsFiles] = attrs.field(factory=Every)
    environments: Every[EnvironmentSource] = attrs.field(factory=Every)

    _lock: "FolderLock | None" = internal(None)
    _changes: list[RecipeChange] = internal(factory=list)
    # this run created the folder, and has not restored its state yet
    _is_new: bool = internal(False)
    _was_refused: bool = internal(False)

    @property
    def folder(self) -> Path:
        return self.job.folder_path

    def open(self) -> None:
        """Create and lock the folder. Raises UserError on all ranks if this recipe may not continue its run."""
        try:
            self._check_ranks_have_equal_recipes()
            self._is_new = run_on_rank0(self.mesh.world, self._acquire_folder)
        except BaseException:
            self.close()
            raise

    def after_restore(self, restored_step: int) -> None:
        """Write the recipe and copy its files: only now, so a failed resume does not replace them."""
        self._is_new = False
        run_on_rank0(self.mesh.world, self._write_run_records)

    def on_failure(self, error: BaseException) -> None:
        """Record whether the run is refused before it has begun."""
        self._was_refused = self._is_new and isinstance(error, UserError)

    def close(self) -> None:
        """Release the lock, and remove this rank's files from a new folder if the run was refused before it began."""
        if self._was_refused:
            self._remove_files_of_refused_run()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _remove_files_of_refused_run(self) -> None:
        """Remove this rank's files, then the empty folders: the other ranks may still write to their logs."""
        logs = self.folder / "log"
        with suppress(OSError):
            for path in self.folder.iterdir() if self.mesh.world.rank == 0 else ():
                if path.is_dir() and path != logs:
                    shutil.rmtree(path)
                elif path != logs:
                    path.unlink()
            (logs / f"rank-{self.mesh.world.rank}.log").unlink(missing_ok=True)
        for folder in (logs, self.folder):
            with suppress(OSError):
                folder.rmdir()

    def _acquire_folder(self) -> bool:
        """Create and lock the folder, check the recipe, and return whether the folder is new."""
        is_new = not self.folder.exists()
        if is_new and self.folder.is_symlink():
            target = self.folder.readlink()
            raise UserError(f"{self.folder} is a link to {target}, which does not exist; create it, or remove the link")
        self.folder.mkdir(parents=True, exist_ok=True)
        from drawloom.components.run.locks import FolderLock

        self._lock = FolderLock(self.folder)
        self._changes = list_recipe_changes_if_safe(self.folder, self.recipe) if _has_step_results(self.folder) else []
        return is_new

    def _write_run_records(self) -> None:
        """Write the recipe, copies of the files it names, and the versions."""
        update_lock_and_log_changes(self.folder, self.recipe, self._changes)
        for node, reader in self.readers.items():
            for setting, paths in reader.list_input_files().items():
                copy_files(
                    create_folder_unless_link(create_folder_unless_link(self.folder / FILES) / node) / setting, paths
                )

        content = json.dumps(collect_versions_and_choices(self.environments), indent=1).encode()
        path = create_folder_unless_link(self.folder / "log") / ENVIRONMENT
        if not path.is_file() or path.read_bytes() != content:
            replace_file(path, content)

    def _check_ranks_have_equal_recipes(self) -> None:
        """Raise UserError on all ranks if their recipes differ."""
        hashes = self.mesh.world.gather_json(self.recipe.hash)
        if different := [rank for rank, digest in enumerate(hashes) if digest != hashes[0]]:
            raise UserError(
                f"rank {different[0]} has a different recipe from rank 0; "
                "start all ranks with the same command and files",
                exit_code=2,
            )


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
            log.warning("%s can't be read and is replaced: %s", path, error)
            return []
        raise UserError(
            f"{path} can't be read, so this recipe can't be compared with it: {error}; "
            "to continue anyway, add --accept-changes",
            exit_code=2,
        ) from error
    if not recipe.accept_changes and any(change.impact != "safe" for change in changes):
        raise UserError(_describe_refusal(folder, changes), exit_code=2)
    return changes


def _has_step_results(folder: Path) -> bool:
    """Return whether a folder contains a step's results; without results, another recipe may use the folder."""
    results = (path for path in folder.iterdir() if path.name not in INITIAL_FILES)
    return any(any(path.iterdir()) if path.is_dir() else path.lstat().st_size for path in results)


def update_lock_and_log_changes(folder: Path, recipe: ResolvedRecipe, changes: list[RecipeChange]) -> None:
    """Write recipe.lock.toml unless it is up to date, and log the changes."""
    for change in changes:
        log.info("%s: the recipe changed: %s", folder, change)
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
