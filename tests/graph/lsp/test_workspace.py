"""Analyses of open recipes."""

from pathlib import Path

import pytest

from drawloom.graph.lsp.workspace import Workspace
from drawloom.graph.recipe.lockfile import LOCK
from support.editor import Write


def test_unsaved_text_is_checked_over_an_unsaved_base(workspace: Workspace, write: Write) -> None:
    """Unsaved texts of a recipe and its bases take precedence over files on disk."""
    Path("base.toml").write_text('extends = "small"\n[store]\nsize = 1\n', "utf-8")
    mine = write("mine.toml", 'extends = "base.toml"\n[trainer]\nworkers = 3\n')
    assert [problem.text for problem in workspace.analyse_and_list_problems(mine)] == ["3 workers can't share 1 values"]
    write("base.toml", 'extends = "small"\n[store]\nsize = 2\n')
    assert [problem.text for problem in workspace.analyse_and_list_problems(mine)] == ["3 workers can't share 2 values"]
    write("base.toml", 'extends = "small"\n[store]\nsize = 3\n')
    assert workspace.analyse_and_list_problems(mine) == []


def test_half_typed_text_keeps_the_last_analysis(workspace: Workspace, write: Write) -> None:
    """A syntax error is the only problem, and the last analysis is kept."""
    mine = write("mine.toml", 'extends = "small"\n[page]\ntitle = "A"\n')
    workspace.analyse_and_list_problems(mine)
    known = workspace.analyses[mine]
    write("mine.toml", 'extends = "small"\n[page]\ntitle = "A"\ncou')
    assert [problem.code for problem in workspace.analyse_and_list_problems(mine)] == ["DL103"]
    assert workspace.analyses[mine] is known and known.graph.nodes["page"].settings["title"] == "A"


def test_dependents_are_the_documents_that_extend_a_document(workspace: Workspace, write: Write) -> None:
    """Dependents extend a document directly or indirectly, or could not be read yet."""
    base = write("base.toml", 'extends = "small"\n')
    middle = write("middle.toml", 'extends = "base.toml"\n')
    top = write("top.toml", 'extends = "middle.toml"\n')
    other = write("other.toml", 'extends = "small"\n')
    for path in (base, middle, top, other):
        workspace.analyse_and_list_problems(path)
    broken = write("broken.toml", "extends = \n")
    workspace.analyse_and_list_problems(broken)
    assert workspace.list_open_dependents(base) == [middle, top, broken]


@pytest.mark.parametrize(
    ("text", "is_recipe"),
    [
        ("", True),
        ('[spare]\nuse = "stores.memory"\n', True),
        ('extends = "nothing"\n', True),
        ("[page]\ntitle = 3\n", True),  # an overlay: the shipped recipe has this node
        ('extends = "small"\n[pa', True),
        ('[project]\nname = "x"\n', False),
        ('[tool.ruff]\nextend = "x.toml"\n', False),
        ('format = "$all"\n', False),
        ('[server]\nuse = "tls"\n', False),
        ("[package\n", False),
    ],
)
def test_recipes_are_distinguished_from_other_toml(
    workspace: Workspace, write: Write, text: str, is_recipe: bool
) -> None:
    """Recipes are recognized by their content, because their names have no mark."""
    assert workspace.is_recipe(write("file.toml", text)) == is_recipe


def test_an_overlay_has_no_problems_that_its_base_may_solve(workspace: Workspace, write: Write) -> None:
    """An overlay's missing node, `use` or variable is not a problem, and a wrong value is."""
    text = 'unset = ["spare"]\n[page]\ntitle = "$vars.name"\nstore = "@store"\n'
    text += '[other]\nuse = "stores.memory"\nsize = "x"\n'
    assert [problem.code for problem in workspace.analyse_and_list_problems(write("overlay.toml", text))] == ["DL303"]
    assert "DL113" in [
        problem.code
        for problem in workspace.analyse_and_list_problems(write("mine.toml", f'extends = "small"\n[pag]\n{text}'))
    ]


def test_a_workspace_lists_recipes_written_by_users(workspace: Workspace, write: Write) -> None:
    """A workspace lists saved and open recipes, without lock files, hidden folders and other TOML files."""
    recipe = 'extends = "small"\n'
    for name in ("a.toml", "sub/b.toml", f"runs/x/{LOCK}", ".hidden/c.toml", "node_modules/d.toml"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(recipe, "utf-8")
    Path("pyproject.toml").write_text("[project]\n", "utf-8")
    unsaved = write("unsaved.toml", recipe)
    here = workspace.folders[0]
    assert [*workspace.find_recipes()] == [here / "a.toml", here / "sub" / "b.toml", unsaved]
    (here.parent / "elsewhere.toml").write_text(recipe, "utf-8")
    assert workspace.is_recipe(unsaved) and not workspace.is_recipe(here.parent / "elsewhere.toml")
