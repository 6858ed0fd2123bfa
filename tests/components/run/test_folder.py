"""The run folder of one and of several ranks."""

from pathlib import Path
from typing import Any

import attrs
import pytest

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.run.folder import LockedFolder
from drawloom.components.run.job import NamedRun
from drawloom.components.run.locks import FolderLock
from drawloom.graph import ResolvedRecipe, UserError
from drawloom.graph.recipe.lockfile import RecipeChange
from support.processes import run_ranks

HEAVY = RecipeChange("model", "layers", "2", "4", "incompatible")


def _changes(older: str) -> list[RecipeChange]:
    return [HEAVY] if older == "another" else []


def _open_on_ranks(path: Path, own_hash: bool = False) -> tuple[str, int, bool]:
    """This rank's error, its exit code, and whether it holds the lock."""
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"), timeout=20)
    mesh = RankMesh(processes=processes)
    processes.open()
    mesh.open()
    recipe = ResolvedRecipe("text", f"hash {processes.rank}" if own_hash else "hash", False, _changes)
    folder = LockedFolder(job=NamedRun(name="x", folder=path), mesh=mesh, recipe=recipe)
    try:
        folder.open()
        holds = folder._lock is not None
        folder.after_restore(0)
        mesh.world.gather_json("both are in")
        folder.close()
        return "open", 0, holds
    except UserError as error:
        return str(error), error.exit_code, folder._lock is not None
    finally:
        processes.close()


def test_rank_0_makes_and_locks_the_folder(tmp_path: Path) -> None:
    """Both ranks open the new folder, rank 0 holds the lock, and the recipe is in it."""
    path = tmp_path / "runs" / "x"
    assert run_ranks(_open_on_ranks, 2, path) == [("open", 0, True), ("open", 0, False)]
    assert (path / "recipe.lock.toml").read_text() == "text"


def test_a_folder_in_use_is_an_error_on_every_rank(tmp_path: Path) -> None:
    """A second run fails on both of its ranks with the same message."""
    lock = FolderLock(tmp_path)
    main, other = run_ranks(_open_on_ranks, 2, tmp_path)
    assert main == other
    assert f"{tmp_path} is in use by process" in main[0]
    lock.release()


def test_a_changed_recipe_is_an_error_on_every_rank(tmp_path: Path) -> None:
    """
    The recipe is refused on both ranks with exit code 2, and the lock is released; if no step was done, it is accepted.
    """
    (tmp_path / "recipe.lock.toml").write_text("another")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    assert [text for text, *_ in run_ranks(_open_on_ranks, 2, tmp_path)] == ["open", "open"]
    (tmp_path / "recipe.lock.toml").write_text("another")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    main, other = run_ranks(_open_on_ranks, 2, tmp_path)
    assert main == other
    assert "[model] layers: 2 -> 4 (incompatible)" in main[0]
    assert main[1:] == (2, False)


def test_a_folder_that_cannot_be_made_is_an_error_on_every_rank(tmp_path: Path) -> None:
    """A file in the folder's place raises on both ranks."""
    (tmp_path / "file").write_text("")
    for text, _, holds in run_ranks(_open_on_ranks, 2, tmp_path / "file"):
        assert text == f"rank 0: {tmp_path / 'file'}: File exists"
        assert not holds


def test_a_link_to_a_missing_folder_is_named(tmp_path: Path, one_rank: Any) -> None:
    """The message has the link's target: a folder on a disk that is not mounted, for example."""
    (tmp_path / "link").symlink_to(tmp_path / "disk/run")
    job = NamedRun(name="x", folder=tmp_path / "link")
    with pytest.raises(UserError, match=r"link is a link to .*disk/run, which does not exist; create it"):
        LockedFolder(job=job, mesh=one_rank, recipe=ResolvedRecipe("", "")).open()


def test_ranks_with_different_recipes_are_refused(tmp_path: Path) -> None:
    """Before anything is written, both ranks raise an error naming the differing rank."""
    for text, code, _ in run_ranks(_open_on_ranks, 2, tmp_path / "x", True):
        assert "rank 1 has a different recipe from rank 0" in text
        assert code == 2
    assert not (tmp_path / "x").exists()


def test_a_failed_restore_leaves_the_recipe_of_the_folder(tmp_path: Path, job: Any, one_rank: Any) -> None:
    """The recipe is written after the restore, not when the folder opens."""
    (tmp_path / "recipe.lock.toml").write_text("another")
    recipe = ResolvedRecipe("text", "hash", True, _changes)
    folder = LockedFolder(job=attrs.evolve(job, folder_path=tmp_path), mesh=one_rank, recipe=recipe)
    folder.open()
    assert (tmp_path / "recipe.lock.toml").read_text() == "another"
    folder.after_restore(0)
    assert (tmp_path / "recipe.lock.toml").read_text() == "text"
    folder.close()


def test_close_releases_the_lock(tmp_path: Path, job: Any, one_rank: Any) -> None:
    """A second node opens the folder only after the first is closed."""
    mine, theirs = (
        LockedFolder(job=attrs.evolve(job, folder_path=tmp_path), mesh=one_rank, recipe=ResolvedRecipe("text", "hash"))
        for _ in range(2)
    )
    mine.open()
    assert mine.folder == tmp_path
    with pytest.raises(UserError, match="is in use by process"):
        theirs.open()
    mine.close()
    theirs.open()
    theirs.close()
