"""SVG pictures of graphs and steps."""

import colorsys
from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from drawloom.graph.drawing.diagram import (
    Arrow,
    Box,
    Diagram,
    SequenceDrawing,
    ValueTrace,
    make_sequence_drawing,
    make_wiring_diagram,
)
from drawloom.graph.drawing.svg import assign_colours, draw_step, draw_wiring, num
from drawloom.graph.wiring.graph import Graph
from support import svg


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 15, 35, 40, 77, 91])
def test_names_have_different_hues(count: int) -> None:
    """Any number of names have as many different colours."""
    colours = assign_colours([str(number) for number in range(count)])
    assert len({colour.strong for colour in colours.values()}) == count


def test_black_is_legible_on_pale_and_white_beside_strong() -> None:
    """Pale colours are light enough for black text, and strong colours are dark enough on white."""
    for colour in assign_colours([str(number) for number in range(30)]).values():
        lightness = [
            colorsys.rgb_to_hls(*(b / 255 for b in bytes.fromhex(code[1:])))[1] for code in (colour.strong, colour.pale)
        ]
        assert lightness[0] < 0.45 and lightness[1] > 0.9


@pytest.mark.parametrize(
    ("number", "text"), [(1.0, "1"), (0.25, "0.25"), (-0.001, "0"), (1234567.0, "1234567"), (100.0, "100")]
)
def test_numbers_are_plain_decimals(number: float, text: str) -> None:
    """Numbers are written without an exponent, which is hard to read in a path."""
    assert num(number) == text


FOCI = ["", "trainer", "stages", "device", "mesh", "checkpoint"]


@pytest.mark.parametrize("focus", FOCI)
def test_every_node_is_drawn_and_all_words_are_in_the_picture(first_run: Graph, focus: str) -> None:
    """Every node has a box with its name and component, and all text is inside the picture."""
    picture = make_wiring_diagram(first_run, "first_run", "trainer", focus)
    drawn = draw_wiring(picture)
    shown = [word.text for word in svg.words(drawn)]
    assert all(box.name in shown and box.use in shown for box in picture.boxes)
    assert not svg.outside(drawn)
    assert len(svg.areas(drawn)) == len(picture.boxes)


@pytest.mark.parametrize("focus", FOCI)
def test_boxes_and_field_labels_do_not_overlap(first_run: Graph, focus: str) -> None:
    """Boxes do not overlap boxes or labels, and labels do not overlap labels."""
    picture = make_wiring_diagram(first_run, "first_run", "trainer", focus)
    drawn = draw_wiring(picture)
    boxes = svg.areas(drawn)
    assert not [pair for pair in combinations(boxes, 2) if svg.overlap(*pair)]
    inside = {text for box in picture.boxes for text in (box.name, box.use)}
    labels = [word for word in svg.words(drawn) if word.text not in inside]
    assert not [label for label in labels for box in boxes if svg.overlap(label.area, box)]
    assert not [pair for pair in combinations(labels, 2) if svg.overlap(pair[0].area, pair[1].area)]


@given(st.dictionaries(st.sampled_from(list(combinations("abcdefgh", 2))), st.text("xy", min_size=9, max_size=15)))
@example({(way[0], way[1]): "x" * 8 + way[-1] for way in ("dgx", "acy", "dex", "bcx", "ghx", "cex", "dhx", "chx")})
def test_labels_at_arrows_do_not_overlap(labels: dict[tuple[str, str], str]) -> None:
    """In any graph, arrow labels are inside the picture and overlap neither labels nor boxes."""
    boxes = tuple(Box(name, "some.component") for name in "abcdefgh")
    arrows = tuple(Arrow(source, target, (label,)) for (source, target), label in labels.items())
    drawn = draw_wiring(Diagram("t", boxes, arrows))
    shown = [word for word in svg.words(drawn) if set(word.text) <= {"x", "y"}]
    assert not [pair for pair in combinations(shown, 2) if svg.overlap(pair[0].area, pair[1].area)]
    assert not [word for word in shown for box in svg.areas(drawn) if svg.overlap(word.area, box)]
    assert not svg.outside(drawn)


def test_members_of_a_sequence_are_drawn_in_its_order(first_run: Graph) -> None:
    """A sequence's members are drawn from top to bottom in the order in which they run."""
    height = {word.text: word.area[1] for word in svg.words(draw_wiring(make_wiring_diagram(first_run, "", "trainer")))}
    phases = first_run.nodes["trainer"].edges["phases"].targets
    assert sorted(phases, key=height.__getitem__) == list(phases)


def test_a_field_is_named_if_it_differs_from_its_box(shop: Callable[..., Graph]) -> None:
    """The field `store` with an edge to [store] has no label, and the field `pages` has one."""
    drawn = draw_wiring(make_wiring_diagram(shop(), "shop", "trainer"))
    shown = [word.text for word in svg.words(drawn)]
    assert shown.count("store") == 1 and shown.count("pages") == 1


def test_a_label_where_arrows_meet_applies_to_all_of_them() -> None:
    """Arrows of several fields that meet are labelled at their starts."""
    boxes = tuple(Box(name, f"x.{name}") for name in ("a", "b", "c"))
    one = Diagram("t", boxes, (Arrow("a", "c", ("left",)), Arrow("b", "c", ("left",))))
    two = Diagram("t", boxes, (Arrow("a", "c", ("left",)), Arrow("b", "c", ("right",))))
    assert [words.text for words in svg.words(draw_wiring(one))].count("left") == 1
    shown = [words.text for words in svg.words(draw_wiring(two))]
    assert shown.count("left") == shown.count("right") == 1
    edge = svg.areas(draw_wiring(two))[0][2]
    starts = {words.text: words.area[0] for words in svg.words(draw_wiring(two))}
    assert starts["left"] == starts["right"] == pytest.approx(edge + 5)


def test_the_focus_has_the_thickest_frame(first_run: Graph) -> None:
    """Exactly one box has a thick frame with a focus, and no box without a focus."""
    assert draw_wiring(make_wiring_diagram(first_run, "", "trainer", "stages")).count('stroke-width="3"/>') == 1
    assert draw_wiring(make_wiring_diagram(first_run, "", "trainer")).count('stroke-width="3"/>') == 0


def test_any_name_gives_well_formed_xml() -> None:
    """Quotes, angle brackets and ampersands read back unchanged, and characters outside of XML are replaced."""
    name = "<a> & \"b\" 'c'"
    drawn = draw_wiring(Diagram(name, (Box(name, "x.y"), Box("bell\x07", "x.y")), (Arrow(name, "bell\x07", (name,)),)))
    shown = [word.text for word in svg.words(drawn)]
    assert shown.count(name) == 3 and "bell\ufffd" in shown


def test_the_same_graph_makes_the_same_picture(first_run: Graph) -> None:
    """Drawing a graph several times gives the same text."""
    assert len({draw_wiring(make_wiring_diagram(first_run, "x", "trainer")) for _ in range(3)}) == 1


def test_a_single_box_is_drawn() -> None:
    """A diagram of one box is drawn, with its title inside the picture."""
    drawn = draw_wiring(Diagram("a long title over a small picture", (Box("a", "b.c"),), ()))
    assert len(svg.areas(drawn)) == 1 and not svg.outside(drawn)


def test_members_are_columns_and_values_are_rows(first_run: Graph) -> None:
    """Member boxes are in order without overlap, and a value's name is left of its first member."""
    step = make_sequence_drawing(first_run, "first_run", "trainer")
    drawn = draw_step(step)
    boxes = svg.areas(drawn)
    assert boxes == sorted(boxes) and len(boxes) == len(step.members)
    assert not [pair for pair in combinations(boxes, 2) if svg.overlap(*pair)]
    for trace in step.traces:
        box = boxes[min(trace.access_by_member)]
        areas = [word.area for word in svg.words(drawn) if word.text == trace.title and word.area[1] > box[3]]
        assert len(areas) == 1 and areas[0][2] < (box[0] + box[2]) / 2


def test_every_access_to_a_value_has_its_mark(first_run: Graph) -> None:
    """Every access of a member to a value has a mark with a tooltip, and the legend has three marks."""
    step = make_sequence_drawing(first_run, "first_run", "trainer")
    tips = [element.text for element in svg.parse(draw_step(step)).iter(f"{svg.SVG}title")][1:]
    access_by_member = [
        f"{step.members[number].name} {verb} {trace.value}"
        for trace in step.traces
        for number, verb in trace.access_by_member.items()
    ]
    assert sorted(filter(None, tips)) == sorted([*access_by_member, "writes", "changes", "reads"])


def test_all_words_are_in_the_picture(first_run: Graph) -> None:
    """All text is inside the picture, also for long names in short steps."""
    long = SequenceDrawing("a title <&> " * 5, (Box("a", "b"),), (ValueTrace("value & \x00" * 9, {0: "reads"}),))
    for step in (make_sequence_drawing(first_run, "first_run", "trainer"), long):
        assert not svg.outside(draw_step(step))


@pytest.mark.parametrize("is_step", [True, False])
def test_a_renderer_without_paint_order_shows_all_words(first_run: Graph, is_step: bool) -> None:
    """Every word shows its colour in Cairo, which draws outlines over letters in the same element."""
    drawn = (
        draw_step(make_sequence_drawing(first_run, "", "trainer"))
        if is_step
        else draw_wiring(make_wiring_diagram(first_run, "", "trainer"))
    )
    assert "paint-order" not in drawn and len(svg.words(drawn)) > 20
    assert svg.without_ink(drawn) == []


def test_the_same_step_makes_the_same_picture(first_run: Graph) -> None:
    """Drawing a step several times gives the same text."""
    assert len({draw_step(make_sequence_drawing(first_run, "", "trainer")) for _ in range(3)}) == 1
