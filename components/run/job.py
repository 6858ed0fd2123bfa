"""The run's name, folder and seed."""

from pathlib import Path

from drawloom.graph import between, component, setting


def _plain_name(name: str) -> str | None:
    if not name or name.startswith(".") or not name.isprintable() or set(name) & set("/\\"):
        return f"{name!r} is not a plain file name; write one without slashes and without a leading dot"
    return None


@component
class NamedRun:
    """A name, a folder and a seed."""

    name: str = setting(impact="safe", check=_plain_name, doc="name of the run, and of its folder")
    folder: Path | None = setting(default=None, impact="safe", doc="the run folder; by default runs/ and the name")
    seed: int = setting(default=0, check=between(0, 2**63), doc="seed of all random numbers of the run")

    @property
    def path(self) -> Path:
        """The path of the run folder."""
        return Path("runs") / self.name if self.folder is None else self.folder
