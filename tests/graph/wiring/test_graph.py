"""The graph of a recipe."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drawloom.graph.inspect.explain import explain
from drawloom.graph.problems import RecipeError
from drawloom.graph.project import Project, Recipe
from drawloom.graph.recipe.merged import MergedRecipe
from drawloom.graph.wiring.graph import Graph

Shop = Callable[..., Graph]


def faults(graph: Graph) -> list[str]:
    """The problems of a graph as text."""
    return [f"[{problem.node}] {problem.text}" for problem in graph.errors]


def test_a_dependency_cycle_is_reported_node_by_node(shop: Shop) -> None:
    """Nodes that need one another are a problem that shows the way round."""
    graph = shop('[page]\nfallback = "@other"\n[other]\nuse = "pages.plain"\ntitle = "Other"\nfallback = "@page"')
    assert faults(graph) == ["[page] dependency cycle: page -> other -> page"]


def test_a_dependency_cycle_is_ordered_and_refused(shop: Shop, project: Project) -> None:
    """An editor explains such a recipe, too: the order has each node once; a part of it can't be opened."""
    graph = shop('[page]\nfallback = "@other"\n[other]\nuse = "pages.plain"\ntitle = "Other"\nfallback = "@page"')
    assert sorted(graph.topological_order(["trainer"])) == ["other", "page", "store", "trainer"]
    assert "of 4, after [store], [other]" in explain(graph, "page", "trainer")
    with pytest.raises(RecipeError, match="dependency cycle"):
        project.container(graph, "page")


def test_a_wrong_component_under_the_expected_name_is_reported(shop: Shop, project: Project) -> None:
    """Where no node implements a port: that with the edge's name, which may have been changed, and what it lacks."""
    graph = shop('[store]\nuse = "servers.loop"\npages = ["@page"]')
    [problem] = [problem for problem in graph.errors if problem.code == "DL316" and problem.node == "page"]
    assert problem.text == (
        "'pages.plain' needs a Store for 'store', but no node implements it: [store] is 'servers.loop': "
        "it has no get() and has no put()"
    )
    assert problem.hint == "`drawloom list --fits store` lists the components that do"
    alone = project.graph(MergedRecipe.of({"page": {"use": "pages.plain", "title": "Shop"}}))
    [problem] = [problem for problem in alone.errors if problem.code == "DL316"]
    assert problem.text.endswith("no node implements it") and problem.hint == "add a node that implements it"


def test_a_node_can_not_need_itself(shop: Shop) -> None:
    """A node with an edge to itself is a dependency cycle."""
    graph = shop('[page]\nfallback = "@page"')
    assert faults(graph) == ["[page] dependency cycle: page -> page"]


def test_constraints_see_settings_of_neighbours(shop: Shop) -> None:
    """Constraints of a component see settings with defaults before anything is built."""
    assert faults(shop("[trainer]\nworkers = 11")) == ["[trainer] 11 workers can't share 10 values"]
    assert faults(shop("[trainer]\nworkers = 11\n[store]\nsize = 11")) == []


def test_neighbour_returns_a_node_only_if_the_edge_leads_to_one(shop: Shop) -> None:
    """A view returns the node of an edge, None for an edge that is left out, and raises if there are several nodes."""
    graph = shop('[trainer]\npages = ["@page", "@other"]\n[other]\nuse = "pages.plain"\ntitle = "Other"')
    trainer = graph.view("trainer")
    store = trainer.neighbour("store")
    assert store is not None and store.name == "store"
    assert graph.view("page").neighbour("fallback") is None
    with pytest.raises(ValueError, match="'pages' leads to 2 nodes: page, other"):
        trainer.neighbour("pages")


def test_reachable_nodes_come_once(shop: Shop) -> None:
    """A view yields its own node and all that its edges lead to, directly or through others, in a circle as well."""
    circle = '[page]\nfallback = "@other"\n[other]\nuse = "pages.plain"\ntitle = "Other"\nfallback = "@page"'
    for text, names in (("", ["trainer", "page", "store"]), (circle, ["trainer", "page", "store", "other"])):
        graph = shop(text)
        found = [view.name for view in graph.view("trainer").reachable()]
        assert found[0] == "trainer" and sorted(found) == sorted(names)


def test_constraints_are_skipped_while_settings_are_invalid(shop: Shop) -> None:
    """While a node or neighbour has a problem, constraints that would fail because of it are not run."""
    assert faults(shop('[trainer]\nworkers = 11\n[store]\nsize = "ten"')) == [
        '[store] size: expected an integer, got the string "ten"'
    ]


def test_closure_puts_needs_first(shop: Shop) -> None:
    """Everything that a node needs comes before it, once."""
    graph = shop()
    assert (
        graph.topological_order(["trainer"]) == ["page", "store", "trainer"]
        or graph.topological_order(["trainer"])[-1] == "trainer"
    )
    order = graph.topological_order(["trainer", "page"])
    assert sorted(order) == ["page", "store", "trainer"]
    assert all(order.index(need) < order.index(name) for name in order for need in graph.needs(name))


def test_a_long_chain_needs_no_recursion(project: Project) -> None:
    """Five thousand nodes in a row are wired, ordered and built."""
    graph = project.graph(MergedRecipe.of(chain(5000)))
    assert graph.errors == []
    with project.container(graph) as objects:
        assert len(objects) == 5002


def chain(length: int) -> dict[str, Any]:
    """Pages that fall back on one another."""
    pages: dict[str, Any] = {"page0": {"use": "pages.plain", "title": "0", "store": "@store"}}
    for number in range(1, length):
        fallback = f"@page{number - 1}"
        pages[f"page{number}"] = {"use": "pages.plain", "title": "x", "store": "@store", "fallback": fallback}
    loop = {"use": "servers.loop", "pages": [f"@page{length - 1}"], "store": "@store"}
    return {"store": {"use": "stores.memory"}, **pages, "trainer": loop}


def test_many_paths_cost_no_more_than_many_nodes(project: Project) -> None:
    """A ladder of diamonds, with 2^200 paths, is ordered and checked for cycles in linear time."""
    pages: dict[str, Any] = {}
    for number in range(200):
        below = {"fallback": f"@left{number - 1}"} if number else {}
        filters = [{"use": "pages.parse"}]
        pages[f"left{number}"] = {"use": "pages.plain", "title": "l", "store": "@store", "filters": filters, **below}
    loop = {"use": "servers.loop", "pages": [f"@{name}" for name in pages], "store": "@store"}
    began = time.process_time()
    graph = project.graph(MergedRecipe.of({"store": {"use": "stores.memory"}, **pages, "trainer": loop}))
    assert graph.errors == [] and len(graph.topological_order(["trainer"])) == 402
    assert time.process_time() - began < 5


def test_a_node_that_nothing_needs_is_a_warning(shop: Shop) -> None:
    """An unused node is a warning and not an error."""
    graph = shop('[spare]\nuse = "pages.plain"\ntitle = "Spare"')
    assert graph.errors == []
    assert [problem.node for problem in graph.problems if problem.warning] == ["spare"]


def test_a_node_that_an_edit_removed_is_unused_without_a_warning(shop: Shop) -> None:
    """An edit leaves the removed node in the recipe on purpose, so that no warning is due."""
    text = '[first]\nuse = "pages.parse"\n[second]\nuse = "pages.parse"\n[page]\nfilters = ["@first", "@second"]'
    assert shop(text).problems == ()
    recipe = shop(text).recipe.with_values({"edit": {"page": {"filters": {"remove": "@first"}}}})
    graph = Graph.of(recipe, shop(text).registry, "trainer")
    assert graph.problems == () and graph.nodes["page"].edges["filters"].targets == ("second",)


def unused(*words: str, text: str = "", folder: Path) -> list[str]:
    """The nodes of a recipe over `first_run` that are reported as unused."""
    (folder / "mine.toml").write_text(f'extends = "first_run"\n{text}', "utf-8")
    problems = Recipe.load(folder / "mine.toml", *words).graph.problems
    return [problem.node for problem in problems if problem.code == "DL322"]


def test_a_node_left_out_by_another_choice_is_not_a_warning(tmp_path: Path) -> None:
    """Nodes of the recipe that is extended, a list that is emptied, and a component without an edge that it had."""
    assert unused(text="[trainer]\non_finish = []\n", folder=tmp_path) == []
    assert unused("trainer.on_finish=[]", "tokens.use=data.tokenized", "tokens.path=store", folder=tmp_path) == []
    spare = '[trainer]\non_finish = ["@sample", "@html_report"]\n[report_of_mine]\nuse = "metrics.fill_rate"\n'
    assert unused("trainer.on_finish=[]", text=spare, folder=tmp_path) == ["report_of_mine"]
    task = '[mine]\nuse = "sampling.sample"\nprompt = "a"\n[trainer]\non_finish = ["@mine"]\n'
    assert unused(text=task, folder=tmp_path) == unused("trainer.on_finish=[]", text=task, folder=tmp_path) == []


def test_a_setting_of_a_node_that_is_left_out_is_a_warning(tmp_path: Path) -> None:
    """The recipe that empties the list also sets what the node would do: one of both is a mistake."""
    text = "[trainer]\non_finish = []\n[export]\nmax_shard = 7\n"
    assert unused(text=text, folder=tmp_path) == ["export"]
    assert unused("trainer.on_finish=[]", "export.max_shard=7", folder=tmp_path) == ["export"]


@pytest.mark.parametrize("members", [1, 2])
def test_a_required_edge_is_found_by_type_if_one_node_fits(shop: Shop, members: int) -> None:
    """One store is taken without a word; two are a problem that names both and the lines to write."""
    graph = shop("" if members == 1 else '[second]\nuse = "stores.memory"')
    if members == 1:
        assert graph.nodes["page"].edges["store"].targets == ("store",)
        return
    assert faults(graph) == [
        f"[{node}] 'store' needs one Store, but [store] and [second] both implement it" for node in ("page", "trainer")
    ]
    assert graph.errors[0].hint == 'write store = "@store" or store = "@second"'


def test_an_inline_node_is_built_for_its_owner_alone(shop: Shop, project: Project) -> None:
    """A table with `use` inside an edge is built once, for its owner alone."""
    graph = shop('[trainer]\npages = ["@page"]\nnamed = { home = "@page" }\n[page]\nstore = { use = "stores.memory" }')
    assert faults(graph) == []
    with project.container(graph) as objects:
        assert objects["page"].store is not objects["store"]
        assert objects["trainer"].named == {"home": objects["page"]}


def test_a_node_whose_name_is_saved_can_not_be_inline(shop: Shop) -> None:
    """A node that is known by its name needs a table of its own."""
    graph = shop('[trainer]\npages = [{ use = "pages.plain", title = "x", store = "@store" }]')
    assert faults(graph) == [
        "[trainer.pages[0]] 'pages.plain' is a Counted, "
        "whose name is saved with its state, so it can't be written inline"
    ]


FILTERS = """
[parse]
use = "pages.parse"
[translate]
use = "pages.translate"
[look_up]
use = "pages.look_up"
[log_in]
use = "pages.log_in"
[page]
filters = [{}]
"""


def texts(shop: Callable[..., Graph], *names: str) -> list[str]:
    """Return the problems for filters in this order."""
    graph = shop(FILTERS.format(", ".join(f'"@{name}"' for name in names)))
    return [f"{problem.text}; {problem.hint}" for problem in graph.errors]


@pytest.mark.parametrize(
    "names",
    [
        ("parse", "translate", "look_up"),
        ("parse", "look_up"),
        ("log_in", "parse", "look_up"),
        ("parse",),
        ("parse", "translate"),
        (),
    ],
)
def test_valid_orders_of_a_sequence_have_no_problems(shop: Callable[..., Graph], names: tuple[str, ...]) -> None:
    """A sequence is valid if values are written before they are read; optional reads need no writer."""
    assert texts(shop, *names) == []


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            ("look_up", "parse"),
            'filters: [look_up] reads words before [parse] writes it; move "@look_up" after "@parse"',
        ),
        (
            ("parse", "look_up", "translate"),
            "filters: [translate] changes words after the last reader [look_up], so the change is lost;"
            ' move "@translate" before "@look_up"',
        ),
        (
            ("look_up",),
            'filters: [look_up] reads words, but no member of the sequence writes it; add "@parse" before "@look_up"',
        ),
        (
            ("parse", "look_up", "log_in"),
            'filters: [look_up] reads user before [log_in] writes it; move "@look_up" after "@log_in"',
        ),
    ],
)
def test_an_invalid_order_of_a_sequence_is_a_problem_with_a_remedy(
    shop: Callable[..., Graph], names: tuple[str, ...], expected: str
) -> None:
    """Reading too early, changing too late and reading an unwritten value are problems with the line to move or add."""
    assert texts(shop, *names) == [expected]


def test_a_sequence_that_names_its_members_a_thousand_times_is_checked_once() -> None:
    """Duplicates are problems, and the order is that of the first of each: work grows with the length alone."""
    recipe = Recipe.load("first_run")
    phases = [f"@{name}" for name in recipe.graph.nodes["trainer"].edges["phases"].targets]
    began = time.process_time()
    problems = recipe.with_values({"trainer": {"phases": phases * 2000}}).graph.problems
    assert {problem.code for problem in problems} == {"DL318"} and len(problems) == len(phases) * 1999
    assert time.process_time() - began < 20  # it took minutes
