"""A store whose module fails."""

raise RuntimeError("this store burnt down")


@component  # noqa: F821
class Broken:  # type: ignore[unreachable]
    """Keeps nothing."""
