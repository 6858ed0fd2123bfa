"""Byte count formatting."""

UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def format_decimal_byte_size(size: float) -> str:
    """Format a byte count in decimal units: `123 bytes`, `12.3 kB`, `12.3 MB`, `4.56 GB` or `4.56 TB`."""
    if size < 1000:
        return f"{size:.0f} bytes"
    unit, scale = choose_byte_unit_and_its_size(size)
    return f"{size / scale:,.{1 if scale < 1e9 else 2}f} {unit}"


def choose_byte_unit_and_its_size(size: float) -> tuple[str, float]:
    """Return the largest unit up to a byte count, at least kB, and its size in bytes."""
    return next(((unit, scale) for unit, scale in UNITS if size >= scale), UNITS[-1])
