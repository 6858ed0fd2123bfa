"""What differs between two recipes."""

from collections.abc import Callable

import pytest

from drawloom.graph.build.graph import Graph
from drawloom.graph.cli.project import Project
from drawloom.graph.recipe.resolving import resolve

Shop = Callable[..., Graph]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("[store]\nsize = 12", ["[store] size: 10 -> 12 (free)"]),
        ('[page]\ntitle = "Other"', ['[page] title: "Shop" -> "Other" (semantic)']),
        (
            '[store]\nuse = "stores.disk"\nfolder = "x"',
            ["[store] swapped: stores.memory -> stores.disk (semantic)"],
        ),
        (
            '[second]\nuse = "pages.plain"\ntitle = "2"\n[trainer]\npages = ["@page", "@second"]',
            [
                '[trainer] pages moved: ["@page"] -> ["@page", "@second"] (semantic)',
                "[second] added: pages.plain (semantic)",
            ],
        ),
    ],
)
def test_differences_name_node_and_key_and_weight(
    shop: Shop, workshop: Project, text: str, expected: list[str]
) -> None:
    """Each difference from an older recipe is told once, with what it means to resume with it."""
    older = resolve(shop()).text
    assert [str(change) for change in resolve(shop(text)).changes(older)] == expected
