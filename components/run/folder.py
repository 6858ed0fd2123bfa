"""The run folder, which one run at a time owns and one recipe belongs to."""

from pathlib import Path

import attrs

from drawloom.components.distributed.rank_errors import run_on_rank0
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.run import RunInfo
from drawloom.components.run.locks import FolderLock, settle_recipe
from drawloom.graph import ResolvedRecipe, UserError, component


@component(impact="safe")
class LockedFolder:
    """A folder that the main rank locks for as long as the run is open."""

    job: RunInfo
    mesh: Mesh
    recipe: ResolvedRecipe

    _lock: FolderLock | None = attrs.field(init=False, default=None)

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return self.job.path

    def open(self) -> None:
        """Make the folder, lock it, and see whether this recipe may go on there; a UserError on all ranks if not."""
        try:
            self._compare_ranks()
            run_on_rank0(self.mesh.world, self._take)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let the next run have the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _take(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self.folder)
        settle_recipe(self.folder, self.recipe)

    def _compare_ranks(self) -> None:
        hashes = self.mesh.world.gather_json(self.recipe.hash)
        if other := [rank for rank, found in enumerate(hashes) if found != hashes[0]]:
            raise UserError(
                f"rank {other[0]} has another recipe than rank 0; start all ranks with the same command and files",
                exit_code=2,
            )
