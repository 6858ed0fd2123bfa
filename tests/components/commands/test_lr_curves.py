"""Pictures of curves over steps."""

from xml.etree import ElementTree

from drawloom.components.commands.lr import BLOCKS, HEIGHT, ScheduleCurve, draw_svg, draw_text_columns


def test_columns_are_as_high_as_values() -> None:
    """A line from 0 to the highest value fills the lower right half, in eighths of a line."""
    curve = ScheduleCurve("a line", [(step, step - 1.0) for step in range(1, 82)])
    lines = draw_text_columns([curve], 5 + 81).splitlines()
    assert lines[0] == "a line" and lines[-1].endswith("step 81")
    rows = [line.partition("│")[2] for line in lines[1 : HEIGHT + 1]]
    heights = [
        sum(BLOCKS.index(row[column]) for row in rows if column < len(row)) for column in range(len(rows[HEIGHT - 1]))
    ]
    assert heights[0] == 0 and heights[-1] == 8 * HEIGHT and heights == sorted(heights)
    assert abs(heights[len(heights) // 2] - 4 * HEIGHT) <= 1
    assert lines[1].startswith("80 │")


def test_a_curve_of_zeros_is_drawn_and_names_are_escaped() -> None:
    """Nothing is divided by zero, in a run of one step, either; a name can't add elements."""
    for points in ([(1, 0.0)], [(1, 0.0), (2, 0.0)]):
        curve = ScheduleCurve("<b>", points)
        drawn = ElementTree.fromstring(draw_svg("<title>", [curve]))
        assert "<b>" in [element.text for element in drawn] and "<title>" in [element.text for element in drawn]
        assert "█" not in draw_text_columns([curve], 40)
