"""Which run this is: its name, its folder and its seed."""

from pathlib import Path

from drawloom.graph import between, component, setting


def _plain_name(name: str) -> str | None:
    if not name or name.startswith(".") or not name.isprintable() or set(name) & set("/\\"):
        return f"{name!r} is no plain file name; write one without slashes and a dot in front"
    return None


@component
class NamedRun:
    """A name, a folder and a seed."""

    name: str = setting(impact="safe", check=_plain_name, doc="name of the run, and of its folder")
    folder: Path | None = setting(default=None, impact="safe", doc="where the run writes; runs/ and its name")
    seed: int = setting(default=0, check=between(0, 2**63), doc="the number from which everything random derives")

    @property
    def path(self) -> Path:
        """The run folder."""
        return Path("runs") / self.name if self.folder is None else self.folder
