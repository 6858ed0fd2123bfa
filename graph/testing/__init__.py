"""For tests of components: one component alone, a part of a recipe, fakes of ports, and the contracts of ports."""

from drawloom.graph.testing.build import Recipe, build
from drawloom.graph.testing.ports import BrokenContract, Call, check_port, expect, fake

__all__ = ["BrokenContract", "Call", "Recipe", "build", "check_port", "expect", "fake"]
