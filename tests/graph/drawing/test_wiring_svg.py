"""The wiring as an SVG."""

from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawloom.graph.build.graph import Graph
from drawloom.graph.drawing.diagram import Arrow, Box, Diagram, wiring
from drawloom.graph.drawing.wiring_svg import draw_wiring
from support import svg

FOCI = ["", "trainer", "stages", "device", "mesh", "checkpoint"]


@pytest.mark.parametrize("focus", FOCI)
def test_every_node_is_there_and_all_words_are_in_the_picture(first_run: Graph, focus: str) -> None:
    """Each box has its name and component; nothing stands outside."""
    picture = wiring(first_run, "first_run", "trainer", focus)
    drawn = draw_wiring(picture)
    shown = [one.text for one in svg.words(drawn)]
    assert all(box.name in shown and box.use in shown for box in picture.boxes)
    assert not svg.outside(drawn)
    assert len(svg.areas(drawn)) == len(picture.boxes)


@pytest.mark.parametrize("focus", FOCI)
def test_no_two_boxes_overlap_and_no_field_stands_on_a_box(first_run: Graph, focus: str) -> None:
    """What is written at arrows is in the gaps between columns."""
    picture = wiring(first_run, "first_run", "trainer", focus)
    drawn = draw_wiring(picture)
    boxes = svg.areas(drawn)
    assert not [pair for pair in combinations(boxes, 2) if svg.overlap(*pair)]
    inside = {text for box in picture.boxes for text in (box.name, box.use)}
    labels = [one for one in svg.words(drawn) if one.text not in inside]
    assert not [one for one in labels for box in boxes if svg.overlap(one.area, box)]
    assert not [pair for pair in combinations(labels, 2) if svg.overlap(pair[0].area, pair[1].area)]


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.sampled_from(list(combinations("abcdefgh", 2))), st.text("xy", min_size=9, max_size=15)))
def test_what_stands_at_arrows_is_legible(labels: dict[tuple[str, str], str]) -> None:
    """Whatever leads where: no words on other words, none on a box, none outside."""
    boxes = tuple(Box(name, "some.component") for name in "abcdefgh")
    arrows = tuple(Arrow(source, target, (label,)) for (source, target), label in labels.items())
    drawn = draw_wiring(Diagram("t", boxes, arrows))
    shown = [one for one in svg.words(drawn) if set(one.text) <= {"x", "y"}]
    assert not [pair for pair in combinations(shown, 2) if svg.overlap(pair[0].area, pair[1].area)]
    assert not [one for one in shown for box in svg.areas(drawn) if svg.overlap(one.area, box)]
    assert not svg.outside(drawn)


def test_the_members_of_a_sequence_stand_in_its_order(first_run: Graph) -> None:
    """From top to bottom, as they are walked through."""
    height = {one.text: one.area[1] for one in svg.words(draw_wiring(wiring(first_run, "", "trainer")))}
    phases = first_run.nodes["trainer"].edges["phases"].targets
    assert sorted(phases, key=height.__getitem__) == list(phases)


def test_a_field_is_named_where_it_says_more_than_its_box(shop: Callable[..., Graph]) -> None:
    """The field `store` of a node [store] is not written, the field `pages` is."""
    drawn = draw_wiring(wiring(shop(), "shop", "trainer"))
    shown = [one.text for one in svg.words(drawn)]
    assert shown.count("store") == 1 and shown.count("pages") == 1


def test_a_name_at_a_meeting_point_holds_for_all_that_meet() -> None:
    """Where arrows with several names come in, none of these stands at the point; each stands at its beginning."""
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
    """One box, and only with a focus."""
    assert draw_wiring(wiring(first_run, "", "trainer", "stages")).count('stroke-width="3"/>') == 1
    assert draw_wiring(wiring(first_run, "", "trainer")).count('stroke-width="3"/>') == 0


def test_any_name_is_well_formed() -> None:
    """Quotes, angles and ampersands come back as they were; what XML can't hold is replaced."""
    name = "<a> & \"b\" 'c'"
    drawn = draw_wiring(Diagram(name, (Box(name, "x.y"), Box("bell\x07", "x.y")), (Arrow(name, "bell\x07", (name,)),)))
    shown = [one.text for one in svg.words(drawn)]
    assert shown.count(name) == 3 and "bell\ufffd" in shown


def test_the_same_graph_makes_the_same_picture(first_run: Graph) -> None:
    """Nothing depends on chance."""
    assert len({draw_wiring(wiring(first_run, "x", "trainer")) for _ in range(3)}) == 1


def test_one_box_alone_is_a_picture() -> None:
    """Without arrows there is a single column."""
    drawn = draw_wiring(Diagram("a long title over a small picture", (Box("a", "b.c"),), ()))
    assert len(svg.areas(drawn)) == 1 and not svg.outside(drawn)
