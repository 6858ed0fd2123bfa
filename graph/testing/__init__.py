"""The testing API: build one component, open a part of a recipe, fake a port, check the contract of a port."""

from drawloom.graph.testing.build import Recipe, build
from drawloom.graph.testing.ports import BrokenContract, Call, check_port, expect, fake

__all__ = ["BrokenContract", "Call", "Recipe", "build", "check_port", "expect", "fake"]
