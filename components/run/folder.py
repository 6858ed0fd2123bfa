"""The run folder: locked by one run at a time (run.lock), and bound to one recipe (recipe.lock.toml)."""

import logging
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import attrs

from drawloom.components.distributed.rank_errors import run_on_rank0
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.run import FILES, ReadsFiles, RunInfo
from drawloom.components.run.locks import FolderLock
from drawloom.components.storage.durable_files import replace_file
from drawloom.components.storage.regular_file import make_folder, open_regular_file
from drawloom.graph import Every, RecipeError, ResolvedRecipe, UserError, component
from drawloom.graph.recipe.lockfile import LOCK, RecipeChange

log = logging.getLogger("drawloom.run")

REMEDY = "remove it, or use another run name"

BEFORE_STEPS = {LOCK, FILES, "run.lock", "log"}
"""What a run folder has before the first step; other files are empty until then."""


@component(impact="safe")
class LockedFolder:
    """A folder that rank 0 locks while the run is open."""

    job: RunInfo
    mesh: Mesh
    recipe: ResolvedRecipe
    readers: Every[ReadsFiles] = attrs.field(factory=Every)

    _lock: FolderLock | None = attrs.field(init=False, default=None)
    _changes: list[RecipeChange] = attrs.field(init=False, factory=list)
    _made: bool = attrs.field(init=False, default=False)  # the folder, by this run, which has not begun
    _refused: bool = attrs.field(init=False, default=False)

    @property
    def folder(self) -> Path:
        """The path of the run folder."""
        return self.job.path

    def open(self) -> None:
        """Make and lock the folder, and check that this recipe may continue there; a UserError on all ranks if not."""
        try:
            self._compare_ranks()
            self._made = run_on_rank0(self.mesh.world, self._acquire)
        except BaseException:
            self.close()
            raise

    def after_restore(self, done: int) -> None:
        """Write the recipe and the files that it names: only now, or a resume that fails would replace them."""
        self._made = False
        run_on_rank0(self.mesh.world, self._write)

    def on_failure(self, error: BaseException) -> None:
        """Note whether the run is refused before it has begun."""
        self._refused = self._made and isinstance(error, UserError)

    def close(self) -> None:
        """Release the lock, and remove a folder that was made for a run that is refused before it has begun."""
        if self._refused:
            self._remove()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _remove(self) -> None:
        """Remove what is this rank's: others may still write to their logs, and the last one finds them empty."""
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

    def _acquire(self) -> bool:
        """Whether the folder was made for this run."""
        made = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self.folder)
        self._changes = check_recipe(self.folder, self.recipe) if _has_steps(self.folder) else []
        return made

    def _write(self) -> None:
        write_recipe(self.folder, self.recipe, self._changes)
        for node, reader in self.readers.items():
            for setting, paths in reader.files_read().items():
                copy_files(make_folder(make_folder(self.folder / FILES) / node) / setting, paths)

    def _compare_ranks(self) -> None:
        hashes = self.mesh.world.gather_json(self.recipe.hash)
        if other := [rank for rank, found in enumerate(hashes) if found != hashes[0]]:
            raise UserError(
                f"rank {other[0]} has a different recipe from rank 0; start all ranks with the same command and files",
                exit_code=2,
            )


def check_recipe(folder: Path, recipe: ResolvedRecipe) -> list[RecipeChange]:
    """
    The changes since the folder's recipe.lock.toml; none if there is no such file.

    Raises UserError if any is not safe or if the file can't be read, unless changes are accepted.
    """
    path = folder / LOCK
    if not path.exists():
        return []
    with open_regular_file(path, REMEDY) as file:
        held = file.read(0, file.size)
    try:
        changes = recipe.changes(held.decode("utf-8"))
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
        raise UserError(_refusal(folder, changes), exit_code=2)
    return changes


def _has_steps(folder: Path) -> bool:
    """Whether a folder holds anything that came of a step: without, its recipe binds no other."""
    others = (path for path in folder.iterdir() if path.name not in BEFORE_STEPS)
    return any(any(path.iterdir()) if path.is_dir() else path.lstat().st_size for path in others)


def write_recipe(folder: Path, recipe: ResolvedRecipe, changes: list[RecipeChange]) -> None:
    """Write recipe.lock.toml, unless the folder has the same already, and log what has changed in it."""
    for change in changes:
        log.info("%s: the recipe changed: %s", folder, change)
    path, text = folder / LOCK, recipe.text.encode()
    if _content(path) != text:
        replace_file(path, text)


def copy_files(folder: Path, paths: Sequence[Path]) -> None:
    """Copy files into a folder, which the run folder keeps so that it can be used without the originals."""
    make_folder(folder)
    for path in paths:
        content, copy = path.read_bytes(), folder / path.name
        if _content(copy) != content:
            replace_file(copy, content)


def _content(path: Path) -> bytes | None:
    """The bytes of a file in the run folder, which may have come from a stranger; None if it is missing."""
    if not path.exists():
        return None
    with open_regular_file(path, REMEDY) as file:
        return file.read(0, file.size)


def _refusal(folder: Path, changes: list[RecipeChange]) -> str:
    lines = [f"{folder} holds a run of another recipe; the differences are:"]
    lines += [f"  {change}" for change in changes]
    if any(change.impact == "incompatible" for change in changes):
        lines += ["the saved state does not fit incompatible changes; undo them, or use another run name"]
    else:
        lines += ["only safe changes are allowed; use another run name, or add --accept-changes"]
    return "\n".join(lines)
