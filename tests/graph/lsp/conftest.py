"""A workspace of the shop in a temporary folder."""

from pathlib import Path

import pytest

from drawloom.graph.lsp.cursor import Cursor
from drawloom.graph.lsp.workspace import Meaning, Workspace
from drawloom.graph.project import Project
from support.editor import Point, Write


@pytest.fixture
def workspace(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """Return a workspace with the test's folder, which becomes the current folder."""
    monkeypatch.chdir(tmp_path)
    return Workspace(project, (tmp_path.resolve(),))


@pytest.fixture
def write(workspace: Workspace) -> Write:
    """Return a function that types a text into a document without saving, and returns the document's path."""

    def write(name: str, text: str) -> Path:
        path = workspace.folders[0] / name
        workspace.texts[path] = text
        return path

    return write


@pytest.fixture
def point(workspace: Workspace, write: Write) -> Point:
    """
    Return a function that writes a text to `mine.toml`, first without the line with `|`, then whole but without `|`,
    and returns the meaning at the place of `|`.
    """

    def point(text: str) -> Meaning:
        before, after = text.split("|")
        for typed in (before.rpartition("\n")[0] + "\n" + after.partition("\n")[2], before + after):
            path = write("mine.toml", typed)
            workspace.analyse_and_list_problems(path)
        cursor = Cursor.at(before + after, len(before))
        assert cursor is not None
        return Meaning.from_cursor(workspace, workspace.get_last_analysis_or_empty(path), cursor)

    return point
