"""A walk through a sequence as an SVG."""

from itertools import combinations

from drawloom.graph.build.graph import Graph
from drawloom.graph.drawing.diagram import Box
from drawloom.graph.drawing.step import Step, Thread, step_of
from drawloom.graph.drawing.step_svg import draw_step
from support import svg


def test_members_stand_from_left_to_right_and_threads_below(first_run: Graph) -> None:
    """Headers in order and without overlap; a thread's name stands left of the member that begins it."""
    step = step_of(first_run, "first_run", "trainer")
    drawn = draw_step(step)
    boxes = svg.areas(drawn)
    assert boxes == sorted(boxes) and len(boxes) == len(step.members)
    assert not [pair for pair in combinations(boxes, 2) if svg.overlap(*pair)]
    for thread in step.threads:
        box = boxes[min(thread.touches)]
        places = [one.area for one in svg.words(drawn) if one.text == thread.title and one.area[1] > box[3]]
        assert len(places) == 1 and places[0][2] < (box[0] + box[2]) / 2


def test_every_touch_has_its_sign(first_run: Graph) -> None:
    """A sign with a tooltip for each thing that a member does to a value, and three in the legend."""
    step = step_of(first_run, "first_run", "trainer")
    tips = [element.text for element in svg.parse(draw_step(step)).iter(f"{svg.SVG}title")][1:]
    touches = [
        f"{step.members[number].name} {verb} {thread.value}"
        for thread in step.threads
        for number, verb in thread.touches.items()
    ]
    assert sorted(filter(None, tips)) == sorted([*touches, "writes", "changes", "reads"])


def test_all_words_are_in_the_picture(first_run: Graph) -> None:
    """Also with long names for short steps, and whatever letters they have."""
    long = Step("a title <&> " * 5, (Box("a", "b"),), (Thread("value & \x00" * 9, {0: "reads"}),))
    for step in (step_of(first_run, "first_run", "trainer"), long):
        assert not svg.outside(draw_step(step))


def test_the_same_step_makes_the_same_picture(first_run: Graph) -> None:
    """Nothing depends on chance."""
    assert len({draw_step(step_of(first_run, "", "trainer")) for _ in range(3)}) == 1
