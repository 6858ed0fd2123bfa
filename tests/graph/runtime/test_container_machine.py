"""Requirements of a recipe that the machine lacks, in `check` and in runs."""

from pathlib import Path
from typing import NoReturn

import pytest

from drawloom.graph.cli.main import main
from drawloom.graph.problems import RecipeError, UserError
from drawloom.graph.project import Project, Recipe
from support.shop.components.pages.plain import Plain
from support.shop.components.servers.loop import Loop
from support.shop.components.stores.memory import Memory

opened_stores: list[str] = []


def raise_lack(reason: str) -> NoReturn:
    """Raise a UserError."""
    raise UserError(reason)


@pytest.fixture
def needy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the store lack a disk and the trainer a network, and record opened stores."""
    opened_stores.clear()
    monkeypatch.setattr(Memory, "check_before_open", lambda self: raise_lack("name: there is no disk"), raising=False)
    monkeypatch.setattr(Memory, "open", lambda self: opened_stores.append(self.name), raising=False)
    monkeypatch.setattr(Loop, "check_before_open", lambda self: raise_lack("there is no network"), raising=False)


def problems(recipe: Recipe, *, skip_machine_checks: bool = False) -> list[str]:
    """List all problems of a recipe."""
    try:
        return [str(problem) for problem in recipe.check(skip_machine_checks=skip_machine_checks)]
    except RecipeError as error:
        return [str(problem) for problem in error.problems]


@pytest.mark.usefixtures("needy")
def test_check_reports_missing_devices_along_with_recipe_errors(project: Project, tmp_path: Path) -> None:
    """Missing devices are reported at the setting or variable that the message names, with recipe errors."""
    path = tmp_path / "mine.toml"
    path.write_text('extends = "small"\n[vars]\nname = "disk"\n[store]\nname = "$vars.name"\n', "utf-8")
    recipe = Recipe.load(path, project=project)
    assert problems(recipe) == [
        f"{path}:3:8: [store] name: there is no disk (DL403)",
        "[trainer] there is no network (DL403)",
    ]
    assert problems(recipe, skip_machine_checks=True) == []
    faulty = Recipe.load(path, "page.title=3", project=project)
    assert [text[-7:] for text in problems(faulty)] == ["(DL403)", "(DL303)"]
    assert "disk" in problems(faulty)[0] and not any("network" in text for text in problems(faulty))


@pytest.mark.usefixtures("needy")
def test_a_run_is_refused_before_anything_is_opened(project: Project) -> None:
    """A run is refused with the problems that `check` prints for the opened nodes."""
    recipe = Recipe.load("small", project=project)
    with pytest.raises(RecipeError) as caught, recipe.open():
        pass
    assert [str(problem) for problem in caught.value.problems] == problems(recipe)
    with pytest.raises(RecipeError, match=r"^\[store\] name: there is no disk \(DL403\)$"), recipe.open("store"):
        pass
    assert opened_stores == []


def test_a_problem_is_reported_by_the_node_that_has_it(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that reads from a faulty store adds no problem, and its own bug is raised."""
    monkeypatch.setattr(Memory, "check_before_open", lambda self: raise_lack("there is no disk"), raising=False)
    recipe = Recipe.load("small", project=project)
    for reads in (lambda self: self.store.check_before_open(), lambda self: self.store.get("what was not read")):
        monkeypatch.setattr(Plain, "check_before_open", reads, raising=False)
        assert problems(recipe) == ["[store] there is no disk (DL403)"]
    monkeypatch.setattr(Memory, "check_before_open", lambda _: None)
    with pytest.raises(KeyError):
        recipe.check()


@pytest.mark.usefixtures("needy")
def test_check_elsewhere_ignores_the_machine(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """`check --elsewhere` ignores the machine in both formats, and other commands do not check it."""
    assert main(["check", "small"], project) == 2 and "there is no disk" in capsys.readouterr().err
    assert main(["check", "small", "--format", "json"], project) == 2 and '"DL403"' in capsys.readouterr().out
    assert main(["check", "small", "--elsewhere"], project) == 0
    assert main(["check", "small", "--elsewhere", "--format", "json"], project) == 0
    assert main(["explain", "small"], project) == main(["show", "small"], project) == 0
