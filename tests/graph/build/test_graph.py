"""The graph of a recipe."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from drawloom.graph.build.graph import Graph
from drawloom.graph.cli.project import Project
from drawloom.graph.recipe.recipe import Recipe

Shop = Callable[..., Graph]


def faults(graph: Graph) -> list[str]:
    """What is wrong, in words."""
    return [f"[{problem.node}] {problem.text}" for problem in graph.faults]


def test_a_circle_is_named_node_by_node(shop: Shop) -> None:
    """Nodes that need one another are a problem that shows the way round."""
    graph = shop('[page]\nfallback = "@other"\n[other]\nuse = "pages.plain"\ntitle = "Other"\nfallback = "@page"')
    assert faults(graph) == ["[page] nodes need one another in a circle: page -> other -> page"]


def test_a_node_can_not_need_itself(shop: Shop) -> None:
    """The smallest circle is found too."""
    graph = shop('[page]\nfallback = "@page"')
    assert faults(graph) == ["[page] nodes need one another in a circle: page -> page"]


def test_constraints_see_settings_of_neighbours(shop: Shop) -> None:
    """A component's own constraints run on settings, with defaults filled in, before anything is built."""
    assert faults(shop("[trainer]\nworkers = 11")) == ["[trainer] 11 workers can't share 10 values"]
    assert faults(shop("[trainer]\nworkers = 11\n[store]\nsize = 11")) == []


def test_constraints_wait_for_settings_that_are_right(shop: Shop) -> None:
    """A fault of a node or neighbour is reported without constraints that would trip over it."""
    assert faults(shop('[trainer]\nworkers = 11\n[store]\nsize = "ten"')) == [
        '[store] size: expected an integer, got the string "ten"'
    ]


def test_closure_puts_needs_first(shop: Shop) -> None:
    """Everything that a node needs stands before it, once."""
    graph = shop()
    assert (
        graph.topological_order(["trainer"]) == ["page", "store", "trainer"]
        or graph.topological_order(["trainer"])[-1] == "trainer"
    )
    order = graph.topological_order(["trainer", "page"])
    assert sorted(order) == ["page", "store", "trainer"]
    assert all(order.index(need) < order.index(name) for name in order for need in graph.needs(name))


def test_a_long_chain_needs_no_recursion(workshop: Project) -> None:
    """Five thousand nodes in a row are wired, ordered and built."""
    graph = workshop.graph(Recipe.of(chain(5000)))
    assert graph.faults == []
    with workshop.container(graph) as objects:
        assert len(objects) == 5002


def chain(length: int) -> dict[str, Any]:
    """Pages that fall back on one another."""
    pages: dict[str, Any] = {"page0": {"use": "pages.plain", "title": "0", "store": "@store"}}
    for number in range(1, length):
        fallback = f"@page{number - 1}"
        pages[f"page{number}"] = {"use": "pages.plain", "title": "x", "store": "@store", "fallback": fallback}
    loop = {"use": "servers.loop", "pages": [f"@page{length - 1}"], "store": "@store"}
    return {"store": {"use": "stores.memory"}, **pages, "trainer": loop}


def test_many_paths_cost_no_more_than_many_nodes(workshop: Project) -> None:
    """A ladder of diamonds, with 2^200 paths, is ordered and checked for circles at once."""
    pages: dict[str, Any] = {}
    for number in range(200):
        below = {"fallback": f"@left{number - 1}"} if number else {}
        filters = [{"use": "pages.parse"}]
        pages[f"left{number}"] = {"use": "pages.plain", "title": "l", "store": "@store", "filters": filters, **below}
    loop = {"use": "servers.loop", "pages": [f"@{name}" for name in pages], "store": "@store"}
    began = time.process_time()
    graph = workshop.graph(Recipe.of({"store": {"use": "stores.memory"}, **pages, "trainer": loop}))
    assert graph.faults == [] and len(graph.topological_order(["trainer"])) == 402
    assert time.process_time() - began < 5


def test_a_node_that_nothing_needs_is_a_warning(shop: Shop) -> None:
    """An unused node is no fault, but is told."""
    graph = shop('[spare]\nuse = "pages.plain"\ntitle = "Spare"')
    assert graph.faults == []
    assert [problem.node for problem in graph.problems if problem.warning] == ["spare"]


@pytest.mark.parametrize("members", [1, 2])
def test_a_required_edge_is_found_by_type_if_one_node_fits(shop: Shop, members: int) -> None:
    """One store is taken without a word; two are a problem that names both and the lines to write."""
    graph = shop("" if members == 1 else '[second]\nuse = "stores.memory"')
    if members == 1:
        assert graph.nodes["page"].edges["store"].targets == ("store",)
        return
    assert faults(graph) == [
        f"[{node}] 'store' needs one Store, and [store] and [second] both are" for node in ("page", "trainer")
    ]
    assert graph.faults[0].hint == 'write store = "@store" or store = "@second"'


def test_nodes_in_place_are_nodes_of_their_own(shop: Shop, workshop: Project) -> None:
    """A table with `use` inside an edge is built once, for its owner alone."""
    graph = shop('[trainer]\npages = ["@page"]\nnamed = { home = "@page" }\n[page]\nstore = { use = "stores.memory" }')
    assert faults(graph) == []
    with workshop.container(graph) as objects:
        assert objects["page"].store is not objects["store"]
        assert objects["trainer"].named == {"home": objects["page"]}


def test_named_nodes_can_not_stand_in_place(shop: Shop) -> None:
    """A node that is known by its name needs a table of its own."""
    graph = shop('[trainer]\npages = [{ use = "pages.plain", title = "x", store = "@store" }]')
    assert faults(graph) == [
        "[trainer.pages[0]] 'pages.plain' is Counted, so it is known by its name and can't stand in place"
    ]
