"""What pictures are made of."""

import colorsys

import pytest

from drawloom.graph.drawing.svg import colours, n


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 15, 35, 40, 77, 91])
def test_each_name_has_a_hue_of_its_own(count: int) -> None:
    """As many names, so many hues."""
    found = colours([str(number) for number in range(count)])
    assert len({colour.strong for colour in found.values()}) == count


def test_black_is_legible_on_pale_and_white_beside_strong() -> None:
    """Pale areas are light for any hue, strong lines dark."""
    for colour in colours([str(number) for number in range(30)]).values():
        lightness = [
            colorsys.rgb_to_hls(*(b / 255 for b in bytes.fromhex(code[1:])))[1] for code in (colour.strong, colour.pale)
        ]
        assert lightness[0] < 0.45 and lightness[1] > 0.9


@pytest.mark.parametrize(("number", "text"), [(1.0, "1"), (0.25, "0.2"), (1234567.0, "1234567"), (12345.67, "12345.7")])
def test_numbers_are_plain_decimals(number: float, text: str) -> None:
    """Never an exponent, which is hard to read in a path."""
    assert n(number) == text
