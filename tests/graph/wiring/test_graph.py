"""Graphs of recipes."""

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


def problem_texts(graph: Graph) -> list[str]:
    """Return a graph's problems as text."""
    return [f"[{problem.node}] {problem.text}" for problem in graph.errors]


def test_a_dependency_cycle_is_reported_node_by_node(shop: Shop) -> None:
    """Nodes that need one another are a problem with the whole cycle."""
    graph = shop('[page]\nfallback = "@other"\n[other]\nuse = "pages.plain"\ntitle = "Other"\nfallback = "@page"')
    assert problem_texts(graph) == ["[page] dependency cycle: page -> other -> page"]


def test_a_dependency_cycle_is_ordered_and_refused(shop: Shop, project: Project) -> None:
    """A graph with a cycle has an order with all nodes, for editors, but can't be opened."""
    graph = shop('[page]\nfallback = "@other"\n[other]\nuse = "pages.plain"\ntitle = "Other"\nfallback = "@page"')
    assert sorted(graph.topological_order(["trainer"])) == ["other", "page", "store", "trainer"]
    assert "of 4, after [store], [other]" in explain(graph, "page", "trainer")
    with pytest.raises(RecipeError, match="dependency cycle"):
        project.container(graph, "page")


def test_a_wrong_component_under_the_expected_name_is_reported(shop: Shop, project: Project) -> None:
    """If no node implements a port, the problem says what the node with the edge's name lacks."""
    graph = shop('[store]\nuse = "servers.loop"\npages = ["@page"]')
    [problem] = [problem for problem in graph.errors if problem.code == "DL316" and problem.node == "page"]
    assert problem.text == (
        "'pages.plain' needs a Store for 'store', but no node implements it: [store] is 'servers.loop': "
        "it has no get() and no put()"
    )
    assert problem.hint == "`drawloom list --fits store` lists the components that do"
    alone = project.graph(MergedRecipe.from_values({"page": {"use": "pages.plain", "title": "Shop"}}))
    [problem] = [problem for problem in alone.errors if problem.code == "DL316"]
    assert problem.text.endswith("no node implements it") and problem.hint.startswith('add a node with use = "stores.')


def test_a_node_cannot_need_itself(shop: Shop) -> None:
    """A node with an edge to itself is a dependency cycle."""
    graph = shop('[page]\nfallback = "@page"')
    assert problem_texts(graph) == ["[page] dependency cycle: page -> page"]


def test_constraints_see_settings_of_neighbours(shop: Shop) -> None:
    """Constraints of a component see settings with defaults before anything is built."""
    assert problem_texts(shop("[trainer]\nworkers = 11")) == ["[trainer] 11 workers can't share 10 values"]
    assert problem_texts(shop("[trainer]\nworkers = 11\n[store]\nsize = 11")) == []


def test_neighbour_returns_a_node_only_if_the_edge_leads_to_one(shop: Shop) -> None:
    """A view returns the node of an edge, None for a missing edge, and raises for several nodes."""
    graph = shop('[trainer]\npages = ["@page", "@other"]\n[other]\nuse = "pages.plain"\ntitle = "Other"')
    trainer = graph.view("trainer")
    store = trainer.neighbour("store")
    assert store is not None and store.name == "store"
    assert graph.view("page").neighbour("fallback") is None
    with pytest.raises(ValueError, match="'pages' leads to 2 nodes: page, other"):
        trainer.neighbour("pages")


def test_reachable_nodes_come_once(shop: Shop) -> None:
    """A view yields its node and all nodes that it needs once, even in a cycle."""
    circle = '[page]\nfallback = "@other"\n[other]\nuse = "pages.plain"\ntitle = "Other"\nfallback = "@page"'
    for text, names in (("", ["trainer", "page", "store"]), (circle, ["trainer", "page", "store", "other"])):
        graph = shop(text)
        reachable = [view.name for view in graph.view("trainer").reachable()]
        assert reachable[0] == "trainer" and sorted(reachable) == sorted(names)


def test_constraints_are_skipped_while_settings_are_invalid(shop: Shop) -> None:
    """Constraints are not run while the node or a neighbour has a problem."""
    assert problem_texts(shop('[trainer]\nworkers = 11\n[store]\nsize = "ten"')) == [
        '[store] size: expected an integer, got the string "ten"'
    ]


def test_closure_puts_needs_first(shop: Shop) -> None:
    """All needs of a node come before it, once."""
    graph = shop()
    assert (
        graph.topological_order(["trainer"]) == ["page", "store", "trainer"]
        or graph.topological_order(["trainer"])[-1] == "trainer"
    )
    order = graph.topological_order(["trainer", "page"])
    assert sorted(order) == ["page", "store", "trainer"]
    assert all(order.index(need) < order.index(name) for name in order for need in graph.needs(name))


def test_a_long_chain_needs_no_recursion(project: Project) -> None:
    """A chain of five thousand nodes is wired, ordered and built without a RecursionError."""
    graph = project.graph(MergedRecipe.from_values(chain(5000)))
    assert graph.errors == []
    with project.container(graph) as objects:
        assert len(objects) == 5002


def chain(length: int) -> dict[str, Any]:
    """Return a chain of pages that have the previous page as fallback."""
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
    graph = project.graph(MergedRecipe.from_values({"store": {"use": "stores.memory"}, **pages, "trainer": loop}))
    assert graph.errors == [] and len(graph.topological_order(["trainer"])) == 402
    assert time.process_time() - began < 5


def test_a_node_that_nothing_needs_is_a_warning(shop: Shop) -> None:
    """An unused node is a warning and not an error."""
    graph = shop('[spare]\nuse = "pages.plain"\ntitle = "Spare"')
    assert graph.errors == []
    assert [problem.node for problem in graph.problems if problem.warning] == ["spare"]


def test_a_node_that_an_edit_removed_is_unused_without_a_warning(shop: Shop) -> None:
    """A node that an edit removes from a list is not reported as unused."""
    text = '[first]\nuse = "pages.shorten"\n[second]\nuse = "pages.parse"\n[page]\nfilters = ["@first", "@second"]'
    assert shop(text).problems == ()
    recipe = shop(text).recipe.with_values({"edit": {"page": {"filters": {"remove": "@first"}}}})
    graph = Graph.build(recipe, shop(text).registry, "trainer")
    assert graph.problems == () and graph.nodes["page"].edges["filters"].targets == ("second",)


def list_unused(*words: str, text: str = "", folder: Path) -> list[str]:
    """List the nodes reported as unused in a recipe that extends `first_run`."""
    (folder / "mine.toml").write_text(f'extends = "first_run"\n{text}', "utf-8")
    problems = Recipe.load(folder / "mine.toml", *words).graph.problems
    return [problem.node for problem in problems if problem.code == "DL322"]


def test_a_node_left_out_by_another_choice_is_not_a_warning(tmp_path: Path) -> None:
    """Nodes of a base are not reported if the recipe empties their list or replaces their component."""
    assert list_unused(text="[trainer]\non_finish = []\n", folder=tmp_path) == []
    assert list_unused("trainer.on_finish=[]", "tokens.use=data.tokenized", "tokens.path=store", folder=tmp_path) == []
    spare = '[trainer]\non_finish = ["@sample", "@html_report"]\n[report_of_mine]\nuse = "metrics.fill_rate"\n'
    assert list_unused("trainer.on_finish=[]", text=spare, folder=tmp_path) == ["report_of_mine"]
    task = '[mine]\nuse = "sampling.sample"\nprompt = "a"\n[trainer]\non_finish = ["@mine"]\n'
    assert (
        list_unused(text=task, folder=tmp_path) == list_unused("trainer.on_finish=[]", text=task, folder=tmp_path) == []
    )


def test_a_setting_of_a_node_that_is_left_out_is_a_warning(tmp_path: Path) -> None:
    """A recipe that sets an unused node's value gets a warning, because one of both is a mistake."""
    text = "[trainer]\non_finish = []\n[export]\nmax_shard = 7\n"
    assert list_unused(text=text, folder=tmp_path) == ["export"]
    assert list_unused("trainer.on_finish=[]", "export.max_shard=7", folder=tmp_path) == ["export"]


@pytest.mark.parametrize("members", [1, 2])
def test_a_required_edge_is_found_by_type_if_one_node_fits(shop: Shop, members: int) -> None:
    """One fitting node is wired by type, and two are a problem with both names and the lines to write."""
    graph = shop("" if members == 1 else '[second]\nuse = "stores.memory"')
    if members == 1:
        assert graph.nodes["page"].edges["store"].targets == ("store",)
        return
    assert problem_texts(graph) == [
        f"[{node}] 'store' needs one Store, but [store] and [second] both implement it" for node in ("page", "trainer")
    ]
    assert graph.errors[0].hint == 'write store = "@store" or store = "@second"'


def test_a_wired_list_has_every_node_that_fits_unless_it_is_written(shop: Shop) -> None:
    """A wired list leads to all fitting tables in the recipe's order, to none if none fits, and else as written."""
    second = '[second]\nuse = "pages.plain"\ntitle = "Second"\nstore = { use = "stores.memory" }\n'

    def find_pages(text: str) -> tuple[str, ...]:
        graph = shop(f'[catalog]\nuse = "servers.catalog"\n{text}', "catalog")
        assert graph.errors == []
        edge = graph.nodes["catalog"].edges.get("pages")
        return () if edge is None else edge.targets

    assert find_pages("") == ("page",)
    assert find_pages(second) == ("page", "second")
    assert find_pages(f'pages = ["@second"]\n{second}') == ("second",)
    graph = shop('[catalog]\nuse = "servers.catalog"\npage = "@page"\n[page]\nuse = "stores.memory"', "catalog")
    assert graph.nodes["catalog"].edges == {}
    (problem,) = graph.nodes["catalog"].problems
    assert problem.hint == "write a table for every page, which is found by type"


def test_an_inline_node_is_built_for_its_owner_alone(shop: Shop, project: Project) -> None:
    """A table with `use` inside an edge is built once, for its owner alone."""
    graph = shop('[trainer]\npages = ["@page"]\nnamed = { home = "@page" }\n[page]\nstore = { use = "stores.memory" }')
    assert problem_texts(graph) == []
    with project.container(graph) as objects:
        assert objects["page"].store is not objects["store"]
        assert objects["trainer"].named == {"home": objects["page"]}


def test_a_node_whose_name_is_saved_cannot_be_inline(shop: Shop) -> None:
    """A node whose state is saved by name needs its own table."""
    graph = shop('[trainer]\npages = [{ use = "pages.plain", title = "x", store = "@store" }]')
    assert problem_texts(graph) == [
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
    """A sequence is valid if required values are written before they are read."""
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
    """Early reads, late changes and unwritten values are problems with the line to move or add."""
    assert texts(shop, *names) == [expected]


def test_a_sequence_that_names_its_members_a_thousand_times_is_checked_once() -> None:
    """Duplicates in a sequence are problems, and checking them takes linear time."""
    recipe = Recipe.load("first_run")
    phases = [f"@{name}" for name in recipe.graph.nodes["trainer"].edges["phases"].targets]
    began = time.process_time()
    problems = recipe.with_values({"trainer": {"phases": phases * 2000}}).graph.problems
    assert {problem.code for problem in problems} == {"DL318"} and len(problems) == len(phases) * 1999
    assert time.process_time() - began < 20  # it took minutes
