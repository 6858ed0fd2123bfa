"""Problems with ranges."""

import os
from pathlib import Path

import pytest

from drawloom.graph.lsp.diagnostics import diagnose, find_offset
from drawloom.graph.lsp.workspace import Workspace
from drawloom.graph.problems import Position
from drawloom.graph.project import Project
from support.editor import Write
from support.golden import ROOT, read_faulty, write_faulty


@pytest.mark.parametrize("name", ["shop", "drawloom"])
def test_marks_are_the_problems_of_check(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Golden recipes have marks with the texts and positions of `check`, or at `extends`.

    Problems of the machine are not marked, because no files are read while a recipe is typed.
    """
    folder = write_faulty(tmp_path / "faulty")
    monkeypatch.chdir(folder)
    workspace, compared = Workspace(Project.from_package("support.shop" if name == "shop" else "drawloom")), set[str]()
    for block in read_faulty().values():
        path, text, golden = folder / f"{block.name}.toml", block.recipe, block.output.splitlines()[1:]
        # Other recipes have values of the command line, or letters that are not ASCII.
        if text.startswith("# project: shop") != (name == "shop") or "# arguments" in text or not text.isascii():
            continue
        workspace.texts = {path: text}
        marks = [*diagnose(workspace, path)]
        if path not in workspace.analyses or not workspace.analyses[path].is_overlay:
            assert [str(mark.problem).replace(os.path.relpath(ROOT), "$ROOT") for mark in marks] == [
                line for line in golden if " nodes, " not in line and "(DL403)" not in line
            ], path.name
            compared |= {mark.problem.code for mark in marks}
        for mark in marks:
            assert 0 <= mark.start <= mark.end <= len(text)
            position = mark.problem.position
            if mark.position_in_other_file is None and position:
                assert mark.start == find_offset(text, position) or mark.end == find_offset(text, position)
    assert len(compared) > 20


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ('[store]\nuse = "stores.memory"\nsize = "big" # not\n', ['"big"']),
        ('[store]\nuse = "stores.memory"\nsise = 3\n', ["sise"]),
        ('[store]\nuse = "stores.memory"\nname = [1,\n2]\n', ["[1,"]),
        ('extends = "small"\n[pag]\nx = 1\n', ["[pag]"]),
        ('[store]\nuse = "stores.memory"\nsize = {a = 3}\n', ["{a = 3}"]),
        ("[store]\nuse\n", ["e"]),
    ],
)
def test_diagnostics_cover_the_faulty_token(workspace: Workspace, write: Write, text: str, marked: list[str]) -> None:
    """A mark covers a key, a header or a value up to the end of its line."""
    path = write("mine.toml", text)
    assert [text[mark.start : mark.end] for mark in diagnose(workspace, path)] == marked


def test_a_problem_of_a_base_is_marked_at_extends(workspace: Workspace, write: Write) -> None:
    """The mark names the position in the base, and the base itself has its own mark."""
    base = write("base.toml", 'extends = "small"\n[store]\nsize = 0\n')
    text = '# A recipe\nextends = "base.toml" # and more\n'
    (mark,) = diagnose(workspace, write("mine.toml", text))
    assert text[mark.start : mark.end] == 'extends = "base.toml" # and more'
    assert mark.position_in_other_file == Position("base.toml", 3, 8) and mark.message.startswith(
        "base.toml:3:8: [store] size: "
    )
    (own,) = diagnose(workspace, base)
    assert own.position_in_other_file is None and own.message.startswith("[store] size: ")


def test_a_position_beyond_the_text_becomes_its_end(workspace: Workspace) -> None:
    """A position beyond a shortened text is mapped to its end."""
    assert find_offset("a\nb", Position("x", 9, 9)) == 3 and find_offset("a\nb", Position("x", 2, 1)) == 2
