"""Graphs to draw: a large one, and what is read back from an SVG."""

import pytest

from drawloom.graph.project import Project
from drawloom.graph.wiring.graph import Graph


@pytest.fixture(scope="session")
def first_run() -> Graph:
    """The wiring of the recipe that people see first, with some forty nodes."""
    project = Project.of("drawloom")
    return project.graph(project.load("first_run")).require_valid()
