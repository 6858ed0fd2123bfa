"""The run folder: locked by one run at a time (run.lock), and bound to one recipe (recipe.lock.toml)."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from drawloom import Every, ResolvedRecipe, UserError, component, internal
from drawloom.graph.recipe.lockfile import RecipeChange
from drawloom.ports import EnvironmentSource, Mesh, ReadsFiles, RunInfo

if TYPE_CHECKING:
    from drawloom.components.run.locks import FolderLock


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
        from drawloom.components.distributed.rank_errors import run_on_rank0

        try:
            # Raise UserError on all ranks if their recipes differ
            hashes = self.mesh.world.gather_json(self.recipe.hash)
            if different := [rank for rank, digest in enumerate(hashes) if digest != hashes[0]]:
                raise UserError(
                    f"rank {different[0]} has a different recipe from rank 0; "
                    "start all ranks with the same command and files",
                    exit_code=2,
                )
            self._is_new = run_on_rank0(self.mesh.world, self._acquire_folder)
        except BaseException:
            self.close()
            raise

    def after_restore(self, restored_step: int) -> None:
        """Write the recipe and copy its files: only now, so a failed resume does not replace them."""
        self._is_new = False
        from drawloom.components.distributed.rank_errors import run_on_rank0
        from drawloom.components.run.folder_records import write_run_records

        def write() -> None:
            write_run_records(self.folder, self.recipe, self._changes, self.readers, self.environments)

        run_on_rank0(self.mesh.world, write)

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
        """Remove this rank's log, on rank 0 all other files, then empty folders: other ranks may still write logs."""
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
        from drawloom.components.run.folder_records import has_step_results, list_recipe_changes_if_safe
        from drawloom.components.run.locks import FolderLock

        self._lock = FolderLock(self.folder)
        self._changes = list_recipe_changes_if_safe(self.folder, self.recipe) if has_step_results(self.folder) else []
        return is_new
