"""How often something is done, as a recipe writes it: every so many steps, after the last one only, or never."""

from typing import Literal

from drawloom.components.ports.run import Step

Cadence = int | Literal["last", "never"]


def due(cadence: Cadence, step: Step) -> bool:
    """Whether a step is one of those: each n-th and the last, the last only, or none."""
    if isinstance(cadence, int):
        return step.last or step.index % cadence == 0
    return cadence == "last" and step.last


def a_cadence(value: Cadence) -> str | None:
    """A check: a number of steps is at least 1."""
    return f"{value} steps is less than 1; 'never' turns it off" if isinstance(value, int) and value < 1 else None
