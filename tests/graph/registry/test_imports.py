"""Files, folders and packages for `--import`."""

import sys
from pathlib import Path

import pytest

from drawloom.graph import UserError
from drawloom.graph.project import Project
from drawloom.graph.recipe.merged import MergedRecipe

STORE = '''"""A store of one's own."""
from drawloom.graph import component
@component
class Small:
    """A small store."""
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, outside of Python's path, with a component in a file and in a folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    (tmp_path / "sub" / "lab_of_imports").mkdir(parents=True)
    for path in ("file_of_imports.py", "sub/lab_of_imports/small.py"):
        (tmp_path / path).write_text(STORE, "utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("given", "use"),
    [
        ("file_of_imports.py", "file_of_imports"),
        ("./file_of_imports.py", "file_of_imports"),
        ("file_of_imports", "file_of_imports"),
        ("sub/lab_of_imports", "lab_of_imports.small"),
        ("sub/lab_of_imports/", "lab_of_imports.small"),
        ("{here}/sub/lab_of_imports", "lab_of_imports.small"),
    ],
)
def test_a_file_or_a_folder_is_found_anywhere(here: Path, given: str, use: str) -> None:
    """A file or folder outside of Python's path is imported by path, or by name in the current folder."""
    project = Project.from_package("support.shop").with_imports([given.format(here=here)])
    assert project.graph(MergedRecipe.from_values({"store": {"use": use}}), root="").errors == []
    assert use in project.registry.names()
    sys.modules.pop(use, None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("missing.py", "there is no package, folder or file 'missing.py'"),
        ("Upper.py", "Upper.py can't be named in a recipe; rename it"),
        ("plain.py", "plain.py contains no component; write @component above a class, or @reward"),
        ("argparse.py", "Python imports .*argparse.py under the name argparse; rename argparse.py"),
        ("os", "there is no package, folder or file 'os'"),
        ("..", ".. can't be named in a recipe; rename it"),
    ],
)
def test_an_invalid_import_is_refused(here: Path, given: str, message: str) -> None:
    """Every invalid import is refused with a remedy, also a file that Python would import from elsewhere."""
    for name in ("Upper.py", "plain.py"):
        (here / name).touch()
    (here / "argparse.py").write_text(STORE, "utf-8")
    with pytest.raises(UserError, match=f"^--import {given}: .*{message}"):
        Project.from_package("support.shop").with_imports([given])


def test_two_components_in_a_file_are_a_problem(here: Path) -> None:
    """Two components in a file are a problem that names both classes."""
    (here / "two_of_imports.py").write_text(STORE + STORE.partition("\n")[2].replace("Small", "Large"), "utf-8")
    project = Project.from_package("support.shop").with_imports(["two_of_imports.py"])
    [problem] = project.graph(MergedRecipe.from_values({"store": {"use": "two_of_imports"}}), root="").errors
    assert "contains the components Small and Large; move every class to a file of its own" in str(problem)
