"""For tests of components: one component alone, a part of a recipe, fakes of ports, and the contracts of ports."""

from drawloom.graph.testing.build import build
from drawloom.graph.testing.contract import BrokenContract, check_port, expect
from drawloom.graph.testing.fake import Call, fake
from drawloom.graph.testing.recipe import Recipe

__all__ = ["BrokenContract", "Call", "Recipe", "build", "check_port", "expect", "fake"]
