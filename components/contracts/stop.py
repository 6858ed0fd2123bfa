"""What everything that may stop a run does."""

from drawloom.components.ports.run import Stop
from drawloom.graph.testing import expect


def nobody_asks_by_himself(stop: Stop) -> None:
    """Without a signal the run goes on."""
    expect([stop.agreed(), stop.agreed()] == [0, 0], "somebody asks for the end of the run")
