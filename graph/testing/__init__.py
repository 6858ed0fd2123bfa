"""The testing API: build one component, fake a port, check a port's contract. Public as `drawloom.testing`."""

from drawloom.graph.testing.ports import BrokenContractError, Call, build, check_port, expect, fake

__all__ = ["BrokenContractError", "Call", "build", "check_port", "expect", "fake"]
