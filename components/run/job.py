"""The run's name, folder and seed."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from drawloom import UserError, between, component, setting
from drawloom.ports import Settings

MAX_NAME_BYTES = 240  # file systems allow 255, and a sweep adds a suffix


def _describe_name_fault(name: str) -> str | None:
    if not name or name.startswith(".") or not name.isprintable() or set(name) & set("/\\"):
        why = f"{name!r} is not a plain file name"
        last = name.rpartition("/")[2]
        if last != name and _describe_name_fault(last) is None:
            return f'{why}; write name = "{last}", and the path of the run folder as folder = "runs/{name}"'
        return f"{why}; write one without slashes and without a leading dot"
    if (size := len(name.encode())) > MAX_NAME_BYTES:
        return f"the name has {size} bytes, and a folder's name may have {MAX_NAME_BYTES}; write a shorter one"
    return None


@component
class NamedRun:
    """A run's name, folder and seed."""

    name: str = setting("run name, also the folder name", impact="safe", check=_describe_name_fault)
    folder: Path | None = setting(
        "run folder; default: runs/NAME, or the run folder given to the command instead of a recipe",
        default=None,
        impact="safe",
    )
    seed: int = setting("seed for all random numbers in the run", default=0, check=between(0, 2**63))

    def open(self) -> None:
        """Raise UserError if the run folder is a file."""
        if self.folder_path.exists() and not self.folder_path.is_dir():
            raise UserError(
                f"folder: {self.folder_path} is a file; write the path of a folder, or one that does not exist yet",
                exit_code=2,
            )

    @property
    def folder_path(self) -> Path:
        return _choose_run_folder(self.name, self.folder)

    def outcome(self) -> dict[str, str]:
        """Return the run folder, for programs."""
        return {"folder": str(self.folder_path)}

    @classmethod
    def settings_to_stay_in_folder(
        cls, settings: Settings, explicit_keys: Collection[str], folder: str
    ) -> dict[str, Any]:
        """Return settings to keep a moved run in its folder, unless `explicit_keys` contains a folder or a name."""
        if "folder" in explicit_keys:
            return {}
        recorded = _choose_run_folder(settings["name"], settings.get("folder"))
        target = _choose_run_folder(settings["name"], None) if "name" in explicit_keys else Path(folder)
        return {} if os.path.realpath(recorded) == os.path.realpath(target) else {"folder": str(target)}


def _choose_run_folder(name: str, folder: Path | str | None) -> Path:
    return Path("runs") / name if folder is None else Path(folder)
