"""A large graph to draw."""

import pytest

from drawloom.graph.project import Project
from drawloom.graph.wiring.graph import Graph


@pytest.fixture(scope="session")
def first_run() -> Graph:
    """Return the graph of the recipe `first_run`, with some forty nodes."""
    project = Project.from_package("drawloom")
    return project.graph(project.load("first_run")).require_valid()
