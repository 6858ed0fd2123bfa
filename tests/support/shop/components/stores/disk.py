"""A store on disk with a record of its calls."""

from pathlib import Path
from typing import Any

from drawloom.graph import component, setting


@component
class Disk:
    """Keeps values in a folder."""

    folder: Path = setting("where")
    journal: list[str] = setting("calls, in order", factory=list)
    fails: str = setting("the moment at which it fails", default="")

    def get(self, key: str) -> Any:
        return (self.folder / key).read_text("utf-8")

    def put(self, key: str, value: Any) -> None:
        (self.folder / key).write_text(value, "utf-8")

    def open(self) -> None:
        self._note("open")

    def close(self) -> None:
        self._note("close")

    def _note(self, moment: str) -> None:
        self.journal.append(moment)
        if moment == self.fails:
            raise RuntimeError(f"{self.folder} can't {moment}")
