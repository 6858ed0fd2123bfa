"""
Component tests: build one component, fake a port, check a component against its port's contract.

The pytest fixtures are `drawloom_build`, `drawloom_fake` and `drawloom_check_port`; `drawloom_opened` opens a component
until the test ends.
"""

from drawloom.graph.testing import BrokenContractError, Call, build, check_port, expect, fake

__all__ = ["BrokenContractError", "Call", "build", "check_port", "expect", "fake"]
