"""A workspace of the shop, in a folder of its own."""

from pathlib import Path

import pytest

from drawloom.graph.lsp.cursor import Cursor
from drawloom.graph.lsp.meaning import Meaning
from drawloom.graph.lsp.workspace import Workspace
from drawloom.graph.project import Project
from support.editor import Point, Write


@pytest.fixture
def workspace(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A workspace that has the folder of the test, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return Workspace(project, (tmp_path.resolve(),))


@pytest.fixture
def write(workspace: Workspace) -> Write:
    """A function that types a text into a document, without saving it; the path of the document."""

    def write(name: str, text: str) -> Path:
        path = workspace.folders[0] / name
        workspace.texts[path] = text
        return path

    return write


@pytest.fixture
def point(workspace: Workspace, write: Write) -> Point:
    """A function that types a text into `mine.toml`, the line with the bar last, and points to the bar."""

    def point(text: str) -> Meaning:
        before, after = text.split("|")
        for typed in (before.rpartition("\n")[0] + "\n" + after.partition("\n")[2], before + after):
            path = write("mine.toml", typed)
            workspace.check(path)
        cursor = Cursor.at(before + after, len(before))
        assert cursor is not None
        return Meaning.of(workspace, workspace.find_analysis(path), cursor)

    return point
