"""Timelines as SVG."""

import re
from xml.etree import ElementTree

import attrs
import pytest

from drawloom.components.pipeline.program.lowering import Sharding
from drawloom.components.pipeline.program.timing import Costs
from drawloom.components.pipeline.simulation.simulator import Simulation, simulate
from drawloom.components.pipeline.simulation.svg import LEFT, draw_svg
from support.schedules import NAMES, schedule

SVG = "{http://www.w3.org/2000/svg}"


def draw_xml(simulation: Simulation) -> ElementTree.Element:
    """Return the picture, read back as XML."""
    return ElementTree.fromstring(draw_svg(simulation, "a title", "a < caption"))


def bars(picture: ElementTree.Element) -> dict[str, ElementTree.Element]:
    """Return the rectangles for actions by their title."""
    rectangles = {}
    for rectangle in picture.iter(f"{SVG}rect"):
        for title in rectangle.findall(f"{SVG}title"):
            rectangles[str(title.text)] = rectangle
    return rectangles


@pytest.mark.parametrize("name", NAMES)
def test_every_action_is_a_bar_at_its_time(name: str) -> None:
    """Every action has a bar in its rank's row, in proportion to its time."""
    simulation = simulate(schedule(name).program(4, 8), Costs(1, 1.5, 0.5, comm=0.25))
    rectangles = bars(draw_xml(simulation))
    assert len(rectangles) == len(simulation.program.stage)
    ends = [float(rectangle.attrib["x"]) + float(rectangle.attrib["width"]) for rectangle in rectangles.values()]
    unit = (max(ends) - LEFT) / simulation.makespan
    for rank in range(4):
        for bar in simulation.iterate_bars(rank):
            rectangle = rectangles[f"{bar.action}: {bar.start:g} to {bar.end:g}"]
            assert float(rectangle.attrib["x"]) == pytest.approx(LEFT + bar.start * unit, abs=0.05)
            assert float(rectangle.attrib["width"]) == pytest.approx((bar.end - bar.start) * unit, abs=0.02)
            assert float(rectangle.attrib["y"]) == pytest.approx(62 + 29 * rank)


def test_all_elements_are_inside_the_picture() -> None:
    """All rectangles and texts are inside the picture, for few actions and many."""
    for name, ranks, microbatches in (("gpipe", 1, 1), ("dual_pipe_v", 8, 32), ("zero_bubble_v", 4, 8)):
        picture = draw_xml(simulate(schedule(name).program(ranks, microbatches), Costs()))
        width, height = float(picture.attrib["width"]), float(picture.attrib["height"])
        for item in picture.iter():
            if "x" in item.attrib:
                assert 0 <= float(item.attrib["x"]) + float(item.attrib.get("width", 0)) <= width
                assert 0 <= float(item.attrib["y"]) + float(item.attrib.get("height", 0)) <= height


def test_each_overlap_has_a_frame() -> None:
    """A frame reaches from the start of the first part to the end of the last."""
    simulation = simulate(schedule("dual_pipe_v").program(4, 8), Costs())
    frames = [item for item in draw_xml(simulation).iter(f"{SVG}rect") if item.attrib["fill"] == "none"]
    assert len(frames) == int(simulation.program.overlaps_previous.sum())
    assert {float(frame.attrib["width"]) for frame in frames} == {3 * 26.0, 4 * 26.0}


def test_stages_and_work_have_their_own_colours() -> None:
    """Ops and local stages have their own colours, all in the legend."""
    picture = draw_xml(simulate(schedule("dual_pipe_v").program(4, 8), Costs()))
    colours: dict[str, set[tuple[str, bool]]] = {}
    for label, rectangle in bars(picture).items():
        stage, work = re.match(r"(\d+)(.)", label).groups()  # type: ignore[union-attr]
        colours.setdefault(rectangle.attrib["fill"], set()).add((work, int(stage) < 4))
    assert len(colours) == 8 and all(len(meanings) == 1 for meanings in colours.values())
    swatches = {item.attrib["fill"] for item in picture.iter(f"{SVG}rect") if item.attrib.get("width") == "13"}
    assert swatches == set(colours)


def test_text_is_escaped() -> None:
    """A caption may have any character."""
    assert "a < caption" in [item.text for item in draw_xml(simulate(schedule("gpipe").program(1, 1), Costs())).iter()]


def test_actions_on_shards_are_thin_bars_below_their_rank() -> None:
    """Each is drawn at its time, between its rank's row and the next, is in the legend, and moves nothing outside."""
    program, sharding = schedule("one_f_one_b").program(3, 4), Sharding(gathered=True)
    simulation = simulate(program, Costs(unshard=0.5, reduce=1), sharding=sharding)
    picture = draw_xml(simulation)
    rectangles = bars(picture)
    assert len(rectangles) == len(program.stage) + 6
    places = [
        float(
            rectangles[
                f"{r}F0: {next(simulation.iterate_bars(r)).start:g} to {next(simulation.iterate_bars(r)).end:g}"
            ].attrib["y"]
        )
        for r in range(3)
    ]
    for rank, bars_of_rank in enumerate(simulation.shard_bars):
        for bar in bars_of_rank:
            rectangle = rectangles[f"{bar.action}: {bar.start:g} to {bar.end:g}"]
            low = float(rectangle.attrib["y"])
            assert places[rank] + 24 <= low
            assert low + float(rectangle.attrib["height"]) < ([*places, 1e9][rank + 1])
    words = [text.text for text in picture.iter(f"{SVG}text")]
    assert "weights gathered" in words and "gradients reduced" in words and "gradients so far reduced" not in words


def test_a_measured_timeline_is_under_the_simulated_one() -> None:
    """Each action has two bars on one scale, the measured one lower and, after slow messages, later."""
    program = schedule("one_f_one_b").program(2, 2)
    simulated, late = simulate(program, Costs()), simulate(program, Costs(comm=1))
    picture = ElementTree.fromstring(draw_svg(simulated, "a title", "a caption", late))
    rectangles = [
        rectangle for rectangle in picture.iter(f"{SVG}rect") if "1F0:" in (rectangle.findtext(f"{SVG}title") or "")
    ]
    (x, y), (later, below) = [(float(rectangle.get("x", 0)), float(rectangle.get("y", 0))) for rectangle in rectangles]
    assert later > x
    assert below > y
    assert len({rectangle.get("width") for rectangle in rectangles}) == 1


def test_transfers_have_bars_below_their_rank() -> None:
    """Each copy has a bar at its time, those to host memory above those back, and the next rank is below both."""
    program = attrs.evolve(schedule("gpipe").program(2, 3), offloaded=frozenset({0, 1}))
    simulation = simulate(program, Costs(offload=0.5))
    rectangles = bars(draw_xml(simulation))
    tops = {}
    for rank in range(2):
        for bar in (*simulation.iterate_bars(rank), *simulation.transfer_bars[rank]):
            rectangle = rectangles[f"{bar.action}: {bar.start:g} to {bar.end:g}"]
            tops[bar.action.stage, bar.action.op] = float(rectangle.attrib["y"])
    assert [tops[0, "F"], tops[0, "OFFLOAD"], tops[0, "RELOAD"], tops[1, "F"]] == sorted(
        {tops[key] for key in ((0, "F"), (0, "OFFLOAD"), (0, "RELOAD"), (1, "F"))}
    )
