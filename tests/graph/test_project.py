"""Recipes in Python."""

from pathlib import Path
from typing import Any

import pytest
import tomli

from drawloom.graph.inspect.serialize import serialize_recipe
from drawloom.graph.problems import RecipeError, UserError
from drawloom.graph.project import Project, Recipe
from drawloom.graph.testing import fake
from support.shop.components.pages.plain import Plain
from support.shop.components.servers.loop import Loop
from support.shop.ports import Store


def test_values_and_overlays_are_merged_as_on_the_command_line(project: Project, tmp_path: Path) -> None:
    """Overlays override the recipe, and values override both."""
    (tmp_path / "kiosk.toml").write_text('[page]\ntitle = "Kiosk"\n[store]\nsize = 3\n', "utf-8")
    recipe = Recipe.load("small", "store.size=4", overlays=[tmp_path / "kiosk.toml"], project=project)
    assert recipe.explain("page.title").startswith('[page] title = "Kiosk"')
    assert recipe.explain("store.size").startswith("[store] size = 4")
    alone = Recipe.load("small", overlays=str(tmp_path / "kiosk.toml"), project=project)
    assert alone.explain("store.size").startswith("[store] size = 3")


def test_a_recipe_is_checked_drawn_and_resolved_without_being_opened(project: Project) -> None:
    """Methods return the texts that the commands print, without opening a node."""
    recipe = Recipe.load("small", 'spare.use="pages.plain"', "spare.title=A", project=project)
    assert [(problem.node, problem.warning) for problem in recipe.check()] == [("spare", True)]
    assert recipe.draw().startswith("[trainer] servers.loop\n") and recipe.draw("svg").startswith("<svg")
    assert 'title = "A"' in recipe.to_resolved_toml()
    assert not Recipe.load("small", project=project).changes_since(Recipe.load("small", project=project))


def test_mistakes_in_python_calls_are_explained(project: Project) -> None:
    """Errors explain a list of values, an unknown format, an unknown node and a run that is not open."""
    with pytest.raises(TypeError, match="is not a string; write one string per value"):
        Recipe.load("small", ["store.size=4"], project=project)  # type: ignore[arg-type]
    small = Recipe.load("small", project=project)
    with pytest.raises(UserError, match="there is no format 'png'; available: dot, mermaid, svg, tree"):
        small.draw("png")  # type: ignore[arg-type]
    run = small.open()
    with pytest.raises(KeyError, match=r"nothing is open; write `with recipe.open\(\) as run:`"):
        run["page"]
    with run, pytest.raises(KeyError, match=r"no open node is called 'pages'; did you mean 'page'\?"):
        run["pages"]


def test_objects_have_short_texts(project: Project) -> None:
    """In a notebook, a component shows its plain settings without edges."""
    recipe = Recipe.load("small", project=project)
    assert repr(recipe) == "<Recipe small>"
    with recipe.open() as run:
        assert repr(run) == f"<Container of {len(run)} open nodes for [trainer]>"
        assert repr(run["page"]) == "Plain(title='Shop')"


def test_check_raises_every_error_at_once(project: Project) -> None:
    """One RecipeError has all errors."""
    with pytest.raises(RecipeError) as caught:
        Recipe.load("small", "page.title=3", "store.sise=4", project=project).check()
    assert [problem.code for problem in caught.value.problems] == ["DL302", "DL303"]


def test_run_returns_objects_by_name_and_by_type(project: Project) -> None:
    """`get` returns the object with a name, or the only object of a type; otherwise the error names the candidates."""
    with Recipe.load("small", project=project).open() as run:
        assert run.get(Loop) is run["trainer"] and run.get(Store) is run["store"]
        assert run.get("nowhere") is None and run.get("page") is run["page"]
        with pytest.raises(LookupError, match=r"no open node implements dict; get a node by name"):
            run.get(dict)
        with pytest.raises(LookupError, match=r"\[.*\] and \[.*\] implement object"):
            run.get(object)


def test_open_with_only_opens_the_dependencies_of_a_node_with_replacements(project: Project) -> None:
    """`open(only=...)` builds a node and its dependencies, with replacements that are checked against ports."""
    store = fake(Store, get="there")
    small = Recipe.load("small", project=project)
    with small.open(only="page", replacements={"store": store}) as run:
        assert set(run) == {"store", "page"}
        assert run.get(Plain).answer("home") == "Shop: there"
    with small.open(only=["page", "store"]) as run:
        assert set(run) == {"store", "page"}
    with pytest.raises(TypeError, match="does not implement"):
        small.open(replacements={"store": 3}).build()
    with pytest.raises(UserError, match=r"no node \[pag\] to open; did you mean 'page'"):
        small.open(only="pag")


def test_problems_of_nodes_that_are_not_opened_are_ignored(project: Project) -> None:
    """Problems of opened nodes and their dependencies are raised, and other problems are not."""
    faulty = Recipe.load("small", "page.title=3", project=project)
    with faulty.open(only="store") as run:
        assert set(run) == {"store"}
    for recipe in (faulty, Recipe.load("small", "store.use=stores.none", project=project)):
        with pytest.raises(RecipeError):
            recipe.open(only="page")


def test_a_preview_opens_previewed_nodes_and_their_members(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes with `preview` return a text, with their `Every` fields filled, and nothing runs."""
    monkeypatch.setattr(Plain, "preview", lambda page: f"a page called {page.title}", raising=False)
    monkeypatch.setattr(Loop, "preview", lambda loop: f"{len(loop.counted)} counted", raising=False)
    monkeypatch.setattr(Loop, "run", lambda _: 1 / 0)
    recipe = Recipe.load("small", project=project)
    with recipe.open() as run:
        counted = len(run.get(Loop).counted)
    assert recipe.preview() == f"a page called Shop\n{counted} counted"


def test_values_make_another_recipe(project: Project) -> None:
    """`with_values` returns another recipe and leaves the first unchanged."""
    small = Recipe.load("small", project=project)
    titles: list[Any] = []
    for recipe in (small, small.with_values({"page": {"title": "Kiosk"}})):
        with recipe.open() as run:
            titles.append(run["page"].title)
    assert titles == ["Shop", "Kiosk"]


def test_a_recipe_is_made_from_plain_values(project: Project) -> None:
    """Plain values are checked like a file, and a part of the recipe is opened without a root."""
    with pytest.raises(RecipeError, match="size") as caught:
        Recipe.of({"store": {"use": "stores.memory", "size": "x"}}, project=project).open(only="store")
    assert [problem.code for problem in caught.value.problems] == ["DL303"]


def test_plain_values_extend_unset_and_edit_like_a_file(project: Project, tmp_path: Path) -> None:
    """A text read from a file and passed as dicts is the same recipe, with the same problems of bases."""
    text = 'extends = "small"\nunset = ["page.title"]\n[store]\nsize = 7\n[edit.trainer.pages]\nremove = "@page"\n'
    (tmp_path / "mine.toml").write_text(text, "utf-8")
    (tmp_path / "above.toml").write_text('extends = "mine.toml"\n', "utf-8")
    source = tmp_path / "values.toml"
    from_files = [
        Recipe.load(tmp_path / "mine.toml", project=project),
        Recipe.load(tmp_path / "above.toml", project=project),
    ]
    from_dicts = [
        Recipe.of(tomli.loads(text), project=project),
        Recipe.of({"extends": "mine.toml"}, str(source), project=project),
    ]
    assert [serialize_recipe(recipe.merged) for recipe in from_dicts] == [
        serialize_recipe(recipe.merged) for recipe in from_files
    ]
    assert "title" not in serialize_recipe(from_dicts[0].merged)["page"]
    with pytest.raises(RecipeError, match=r"^mine: extends .smal., which is not a shipped recipe"):
        Recipe.of({"extends": "smal"}, "mine", project=project)


def test_merged_values_unset_and_edit_but_do_not_extend(project: Project) -> None:
    """`with_values` removes a node and edits a list, and refuses a base."""
    small = Recipe.load("small", project=project).with_values(
        {"edit": {"trainer": {"pages": {"remove": "@page"}}}, "unset": ["page"]}
    )
    assert small.check() == [] and small.graph.needs("trainer") == ("store",)
    with pytest.raises(RecipeError, match=r"^mine: values .* can't extend another one; .* \(DL120\)"):
        small.with_values({"extends": "small"}, "mine").check()
