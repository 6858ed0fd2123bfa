"""What every run folder is."""

from drawloom.components.ports.run import RunFolder
from drawloom.graph.testing import expect


def it_can_be_written_into(folder: RunFolder) -> None:
    """It is there, and a file can be written in it."""
    expect(folder.folder.is_dir(), f"{folder.folder} is no folder")
    probe = folder.folder / "written by a contract"
    probe.write_text("x", "utf-8")
    probe.unlink()
