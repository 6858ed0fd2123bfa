"""How a number of bytes is written for people."""

UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def byte_size(size: float) -> str:
    """A number of bytes as `123 bytes`, `12.3 kB`, `12.3 MB`, `4.56 GB` or `4.56 TB`: in decimal units."""
    if size < 1000:
        return f"{size:.0f} bytes"
    unit, scale = unit_of(size)
    return f"{size / scale:,.{1 if scale < 1e9 else 2}f} {unit}"


def unit_of(size: float) -> tuple[str, float]:
    """The largest unit that a number of bytes is at least one of, or kB, and its bytes."""
    return next((each for each in UNITS if size >= each[1]), UNITS[-1])
