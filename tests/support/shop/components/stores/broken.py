"""A store whose module fails."""

from drawloom.graph import component

FIRE = "this store burnt down"
if FIRE:
    raise RuntimeError(FIRE)


@component
class Broken:
    """Keeps nothing."""
