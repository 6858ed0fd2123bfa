"""Widths of rows with shared texts; `tests/kernels/attention/test_tree.py` tests their layout."""

from drawloom.components.state.prefix_tree import round_width_up


def test_few_widths_are_used() -> None:
    """A width has room for the tokens, with less than a quarter of padding from 64 on; there are few to compile for."""
    widths = [round_width_up(tokens) for tokens in range(1, 8193)]
    assert all(0 <= width - tokens < max(tokens / 4, 16) for tokens, width in enumerate(widths, 1))
    assert len({*widths[4096:]}) == 4 and round_width_up(0) == 16
