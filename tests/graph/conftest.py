"""A small shop, wired by these tests."""

from collections.abc import Callable
from typing import Any

import pytest
import tomli

from drawloom.graph.project import Project
from drawloom.graph.recipe.merged import MergedRecipe
from drawloom.graph.wiring.graph import Graph

SHOP = """
[store]
use = "stores.memory"

[page]
use = "pages.plain"
title = "Shop"

[trainer]
use = "servers.loop"
pages = ["@page"]
"""


@pytest.fixture
def project() -> Project:
    """Return the project with the shop's components and recipes."""
    return Project.from_package("support.shop")


@pytest.fixture
def shop(project: Project) -> Callable[..., Graph]:
    """Return a function that merges TOML text over a shop with one page and returns the graph."""

    def make(text: str = "", root: str = "trainer") -> Graph:
        data: dict[str, Any] = tomli.loads(text)
        return project.graph(MergedRecipe.from_values(tomli.loads(SHOP)).with_values(data), root)

    return make
