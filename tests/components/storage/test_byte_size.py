"""Numbers of bytes as text."""

import pytest

from drawloom.components.storage.byte_size import choose_byte_unit_and_its_size, format_decimal_byte_size


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (1_500_000, "1.5 MB"),
        (3_140_000_000, "3.14 GB"),
        (5 * 10**16, "50,000.00 TB"),
    ],
)
def test_the_unit_follows_the_size(size: int, text: str) -> None:
    """Sizes have the greatest decimal unit with a value of one at least."""
    assert format_decimal_byte_size(size) == text


def test_columns_of_tables_have_a_unit_also_for_few_bytes() -> None:
    """A column is written in its largest number's unit, kB at least."""
    assert [choose_byte_unit_and_its_size(size)[0] for size in (0, 10**6, 10**9)] == ["kB", "MB", "GB"]
