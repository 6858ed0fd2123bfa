"""Differences between two recipes."""

from collections.abc import Callable
from typing import Any

import pytest
import tomli
from hypothesis import given

from drawloom.graph.inspect.changes import diff
from drawloom.graph.inspect.resolved import make_resolved_recipe
from drawloom.graph.problems import RecipeError
from drawloom.graph.project import Project
from drawloom.graph.recipe.merged import MergedRecipe
from drawloom.graph.wiring.graph import Graph
from support.made_up import recipes

Shop = Callable[..., Graph]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("[store]\nsize = 12", ["[store] size: 10 -> 12 (safe)"]),
        ('[page]\ntitle = "Other"', ['[page] title: "Shop" -> "Other" (changes_training)']),
        (
            '[store]\nuse = "stores.disk"\nfolder = "x"',
            ["[store] swapped: stores.memory -> stores.disk (changes_training)"],
        ),
        (
            '[second]\nuse = "pages.plain"\ntitle = "2"\n[trainer]\npages = ["@page", "@second"]',
            [
                '[trainer] pages moved: ["@page"] -> ["@page", "@second"] (changes_training)',
                "[second] added: pages.plain (changes_training)",
            ],
        ),
    ],
)
def test_a_difference_names_node_key_and_impact(shop: Shop, project: Project, text: str, expected: list[str]) -> None:
    """Every difference from an older recipe is listed once, with its impact on a resumed run."""
    older = make_resolved_recipe(shop()).text
    assert [str(change) for change in make_resolved_recipe(shop(text)).changes(older)] == expected


RENAMED = """
format = 1
[store]
use = "stores.of_yesterday"
size = 3
[page]
use = "pages.plain"
title = "Shop"
headline = "gone since"
store = "@store"
[trainer]
use = "servers.loop"
pages = ["@page"]
store = "@store"
workers = 1
"""


def lines(project: Project, old: MergedRecipe, new: Graph) -> list[str]:
    """Return the differences as text."""
    return [str(change) for change in diff(old, new)]


def test_a_difference_in_writing_is_cosmetic(shop: Shop, project: Project) -> None:
    """A default or an edge that is written out, and a variable that is replaced, are cosmetic."""
    old = project.load("small")
    text = '[store]\nsize = 10\n[page]\nstore = "@store"'
    assert lines(project, old, shop(text)) == [
        "[store] size: left out -> written (cosmetic)",
        "[page] store: left out -> written (cosmetic)",
        "[page] title: $vars.title -> written (cosmetic)",
    ]


def test_the_order_of_tables_is_cosmetic(project: Project) -> None:
    """The same tables in another order are a cosmetic difference."""
    data = {"store": {"use": "stores.memory"}, "page": {"use": "pages.plain", "title": "x"}}
    graph = project.graph(MergedRecipe.from_values(dict(reversed(data.items()))), root="")
    assert lines(project, MergedRecipe.from_values(data), graph) == ["tables: reordered (cosmetic)"]


def test_an_old_run_is_compared_as_it_was_written(shop: Shop, project: Project) -> None:
    """Components and settings that no longer exist are listed, and defaults of today are not."""
    assert lines(project, MergedRecipe.from_values(tomli.loads(RENAMED)), shop()) == [
        "[store] swapped: stores.of_yesterday -> stores.memory (changes_training)",
        '[page] headline: "gone since" -> absent (changes_training)',
    ]


def test_inline_nodes_are_compared_key_by_key(shop: Shop, project: Project) -> None:
    """A changed setting of an inline node is listed under the node's name."""
    old, new = (f'[trainer]\nstore = "@store"\n[page]\nstore = {{ use = "stores.memory", size = {n} }}' for n in (3, 4))
    assert lines(project, shop(old).recipe, shop(new)) == ["[page.store] size: 3 -> 4 (safe)"]


def test_problems_of_either_recipe_are_raised(shop: Shop, project: Project) -> None:
    """A faulty recipe is not compared, and its problems are raised."""
    faulty = shop('[store]\nsize = "x"')
    with pytest.raises(RecipeError, match="size"):
        lines(project, faulty.recipe, shop())
    with pytest.raises(RecipeError, match="size"):
        lines(project, shop().recipe, faulty)


def test_true_and_1_are_different_values(project: Project) -> None:
    """Values that are equal in Python, but not in TOML, are different."""
    graphs = [
        project.graph(MergedRecipe.from_values({"a": {"use": "stores.varied", "anything": [value]}}), root="")
        for value in (1, True, 1.0)
    ]
    for one in graphs:
        assert [len(lines(project, one.recipe, other)) for other in graphs] == [int(one is not g) for g in graphs]


@given(recipes(), recipes())
def test_diff_and_a_resuming_run_list_the_same_changes(one: dict[str, Any], other: dict[str, Any]) -> None:
    """`diff` without cosmetic changes equals the changes of a resumed run, and none means equal hashes."""
    project = Project.from_package("support.shop")
    graphs = [project.graph(MergedRecipe.from_values(data), root="") for data in (one, other)]
    resolved = [make_resolved_recipe(graph) for graph in graphs]
    changes = [change for change in diff(graphs[0].recipe, graphs[1]) if change.impact != "cosmetic"]
    assert changes == resolved[1].changes(resolved[0].text)
    assert (changes == []) == (resolved[0].hash == resolved[1].hash)
    assert resolved[1].changes(resolved[1].text) == []
