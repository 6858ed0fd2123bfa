"""Definitions of nodes, settings, variables and components."""

from pathlib import Path

import pytest

from drawloom.graph.lsp.references import find_definitions
from drawloom.graph.lsp.workspace import Workspace
from support.editor import Point

BASE = (
    'extends = "small"\n[store]\nsize = 3\n[a.x]\nuse = "stores.memory"\n[a.y]\nuse = "stores.memory"\n[vars]\nn = 1\n'
)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("[st|ore]\n", ["small.toml: [store]"]),
        ("[store]\nsi|ze = 4\n", ["base.toml: size = 3"]),
        ("[store]\nna|me = 'x'\n", ["memory.py:     name: str = setting("]),
        ("[store]\nuse = 'stores.memo|ry'\n", ["memory.py: class Memory:"]),
        ("[page]\nuse = 'pages.none|'\n", []),
        ("[trainer]\npages = ['@pa|ge']\n", ["small.toml: [page]"]),
        ("[trainer]\npages = ['@a|.*']\n", ["base.toml: [a.x]", "base.toml: [a.y]"]),
        ("[edit.trainer.pages]\nremove = '@pa|ge'\n", ["small.toml: [page]"]),
        ("[store]\nsize = '$vars.|n'\n", ["base.toml: n = 1"]),
        ("[vars]\nn| = 2\n", ["base.toml: n = 1"]),
        ("[vars]\nm| = 2\n", []),
        ("[m|ine]\nuse = 'stores.memory'\n", ["memory.py: class Memory:"]),
        ("[trainer]\npages = [{ use = 'pages.plain', ti|tle = 'x' }]\n", ["plain.py:     title: str = setting("]),
        ("[nowhere]\nx|y = 3\n", []),
        ("[store]\nno|ne = 3\n", []),
    ],
)
def test_a_definition_is_in_a_lower_recipe_or_in_the_source(
    workspace: Workspace, point: Point, text: str, lines: list[str]
) -> None:
    """Definitions lead to a lower recipe or to the component's source, and a group has several."""
    Path("base.toml").write_text(BASE, "utf-8")
    positions = [*find_definitions(workspace, point(f'extends = "base.toml"\n{text}'))]
    shown = []
    for position in positions:
        path = Path(position.source)
        shown.append(f"{path.name}: {path.read_text('utf-8').splitlines()[position.line - 1]}")
    assert [line.split(" = setting(")[0] for line in lines] == [line.split(" = setting(")[0] for line in shown]


def test_definitions_of_bases_are_files(workspace: Workspace, point: Point) -> None:
    """A base leads to the shipped recipe or to the file beside the recipe."""
    Path("base.toml").write_text(BASE, "utf-8")
    assert [Path(p.source).name for p in find_definitions(workspace, point('extends = ["sm|all", "base.toml"]\n'))] == [
        "small.toml"
    ]
    assert [Path(p.source).name for p in find_definitions(workspace, point('extends = ["small", "base|.toml"]\n'))] == [
        "base.toml"
    ]
    assert [*find_definitions(workspace, point('extends = ["small", "none|.toml"]\n'))] == []
