"""The run folder: locked by one run at a time, and bound to one recipe."""

from pathlib import Path

import attrs

from drawloom.components.distributed.rank_errors import run_on_rank0
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.run import RunInfo
from drawloom.components.run.locks import FolderLock, claim_recipe
from drawloom.graph import ResolvedRecipe, UserError, component


@component(impact="safe")
class LockedFolder:
    """A folder that rank 0 locks while the run is open."""

    job: RunInfo
    mesh: Mesh
    recipe: ResolvedRecipe

    _lock: FolderLock | None = attrs.field(init=False, default=None)

    @property
    def folder(self) -> Path:
        """The path of the run folder."""
        return self.job.path

    def open(self) -> None:
        """Make and lock the folder, and check that this recipe may continue there; a UserError on all ranks if not."""
        try:
            self._compare_ranks()
            run_on_rank0(self.mesh.world, self._acquire)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _acquire(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self.folder)
        claim_recipe(self.folder, self.recipe)

    def _compare_ranks(self) -> None:
        hashes = self.mesh.world.gather_json(self.recipe.hash)
        if other := [rank for rank, found in enumerate(hashes) if found != hashes[0]]:
            raise UserError(
                f"rank {other[0]} has a different recipe from rank 0; start all ranks with the same command and files",
                exit_code=2,
            )
