"""Curves in text and SVG."""

from xml.etree import ElementTree

from drawloom.components.commands._plots import HEIGHT, Panel, draw_svg_panels, draw_text_plot


def test_letters_rise_with_the_values() -> None:
    """A line from 0 to the highest value goes from the lower left to the upper right; shared cells have a star."""
    lines = draw_text_plot("a line", {"up": [(step, step - 1) for step in range(1, 82)], "flat": [(1, 0)]}, 4 + 81)
    title, up, flat, *rows, _, axis = lines.splitlines()
    assert (title, up, flat) == ("a line", "  a up", "  b flat") and axis.endswith("step 81")
    columns = [row.partition("│")[2] for row in rows]
    assert len(rows) == HEIGHT and rows[0].startswith("80 │") and columns[0].endswith("a")
    firsts = [len(column) - len(column.lstrip()) for column in columns]
    assert firsts == sorted(firsts, reverse=True) and columns[-1][0] == "*"


def test_a_curve_of_zeros_is_drawn_and_names_are_escaped() -> None:
    """Nothing is divided by zero, in a run of one step, either; a name can't add elements."""
    for points in ([(1, 0.0)], [(1, 0.0), (2, 0.0)]):
        panel = Panel("<b>", "step", {"<i>": points}, is_logarithmic=False)
        drawn = ElementTree.fromstring(draw_svg_panels("<title>", [panel]))
        assert {"<b>", "<i>", "<title>"} <= {element.text for element in drawn}
        assert draw_text_plot("zeros", {"": points}, 40).count("a") == len(points)


def test_equal_ratios_are_equally_long_on_logarithmic_axes() -> None:
    """A power law is a straight line; a dashed curve has no marks."""
    curves = {"law": [(x, x**-2.0) for x in (1.0, 10.0, 100.0)], "fit": [(1.0, 1.0), (100.0, 1e-4)]}
    drawn = ElementTree.fromstring(draw_svg_panels("a law", [Panel("loss", "flops", curves, frozenset({"fit"}))]))
    circles = [element for element in drawn if element.tag.endswith("circle")]
    xs, ys = ([float(circle.attrib[name]) for circle in circles] for name in ("cx", "cy"))
    assert len(xs) == 3 and abs(xs[1] - (xs[0] + xs[2]) / 2) < 0.02 and abs(ys[1] - (ys[0] + ys[2]) / 2) < 0.02
