"""The Aim repository of a run folder: there as a whole or not at all, and with one run in it."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from drawloom.components.storage.atomic_write import rename


def open_repository(aim: Any, folder: Path) -> Any:
    """
    The repository `.aim` in a folder, made if it is missing.

    To make one takes Aim a second and another process. If it is killed meanwhile, Aim can't open what is left: so it
    is made aside and renamed.
    """
    if not (folder / ".aim").exists():
        for left in folder.glob(".aim-*"):
            shutil.rmtree(left, ignore_errors=True)
        aside = Path(tempfile.mkdtemp(prefix=".aim-", dir=folder))
        aim.Repo.from_path(str(aside), init=True)
        rename(aside / ".aim", folder / ".aim")
        aside.rmdir()
    return aim.Repo.from_path(str(folder))


def run_in(folder: Path) -> str:
    """
    The hash of the run that the repository holds, empty if there is none.

    A run folder has one Aim run, though it be killed before its first checkpoint and start anew.
    """
    chunks = _chunks(folder)
    return min((path.name for path in chunks.iterdir()), default="") if chunks.is_dir() else ""


def has_run(folder: Path, run: str) -> bool:
    """Whether the repository holds the run of this hash."""
    return (_chunks(folder) / run).is_dir()


def free_run(folder: Path, run: str) -> None:
    """
    See to it that the run can be opened for writing: to Aim it exists if its folder does.

    The run folder is ours alone, so a lock was left by a killed process; Aim would trust the number of that process,
    which may be another one's by now.
    """
    (_chunks(folder) / run).mkdir(parents=True, exist_ok=True)
    (folder / ".aim" / "locks" / f"{run}.softlock").unlink(missing_ok=True)


def _chunks(folder: Path) -> Path:
    return folder / ".aim" / "meta" / "chunks"
