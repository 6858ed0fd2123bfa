"""Timelines as text."""

import re

import attrs

from drawloom.components.pipeline.program.lowering import Sharding
from drawloom.components.pipeline.program.timing import Costs
from drawloom.components.pipeline.simulation.simulator import simulate
from drawloom.components.pipeline.simulation.text import draw_text
from support.schedules import parse_program, schedule


def draw_lines(name: str, ranks: int, microbatches: int, width: int = 120, costs: Costs | None = None) -> list[str]:
    """Return the lines of a drawing."""
    program = schedule(name).program(ranks, microbatches)
    return draw_text(simulate(program, costs or Costs()), width).splitlines()


def test_actions_are_drawn_at_their_time() -> None:
    """A unit of time is as wide as a label, a backward two units, and waiting is blank."""
    assert draw_lines("one_f_one_b", 2, 3) == [
        "rank 0  F0 F1       B0--- F2 B1---    B2---",
        "rank 1     F0 B0--- F1 B1--- F2 B2---",
        "",
        "F forward, B backward, I input gradients, W weight gradients",
    ]


def test_second_stages_are_lower_case_and_overlaps_joined() -> None:
    """Lower-case labels are of a rank's second stage, and a bar joins the parts of an overlap."""
    lines = draw_lines("dual_pipe_v", 2, 4)
    assert lines[0].startswith("rank 0  F0 F1 F2 f0 i0 w0 f1 F3|b1--- f2|B0---")
    assert lines[-1].endswith("small letters: the rank's second stage")


def test_more_stages_are_numbered() -> None:
    """With three stages or more on a rank, labels name the stage."""
    program = schedule("looped_bfs", stages_per_rank=3).program(1, 1)
    assert draw_text(simulate(program, Costs())).startswith("rank 0  0F0 1F0 2F0 2B0---- 1B0---- 0B0----")


def test_long_timelines_are_cut_into_bands() -> None:
    """No line is wider than asked for, and no label is cut."""
    lines = draw_lines("zero_bubble_1p", 4, 16, width=80)
    assert max(map(len, lines)) <= 80
    labels = re.findall(r"[FIW]\d+", "".join(line for line in lines if line.startswith("rank")))
    assert len(labels) == 4 * 16 * 3


def test_very_long_timelines_have_one_letter_a_unit() -> None:
    """A timeline with too many bands has a letter for each time unit, and dots for idle time."""
    lines = draw_lines("zero_bubble_v", 8, 32)
    assert lines[7].startswith("rank 7  ·······FfFfFf")
    assert sum(line.count("F") + line.count("f") for line in lines if line.startswith("rank")) == 8 * 2 * 32


def test_a_timeline_of_mostly_waits_has_few_columns() -> None:
    """Messages a billion times as long as actions, and equally different actions, are drawn in few columns."""
    for costs in (Costs(comm=1e9), Costs(1, 1e9, 1)):
        assert sum(map(len, draw_lines("v_half", 3, 7, costs=costs))) < 100_000


def test_measured_costs_keep_their_proportions() -> None:
    """The shortest op is as wide as a label, all others in proportion."""
    assert draw_lines("one_f_one_b", 1, 1, costs=Costs(6, 1, 1))[0] == "rank 0  F0------ B0"
    assert draw_lines("zero_bubble_1p", 1, 1, costs=Costs(1, 1, 2))[0] == "rank 0  F0 I0 W0---"


def test_a_second_row_shows_when_weights_are_gathered_and_gradients_reduced() -> None:
    """Shard actions are drawn below simultaneous actions, even if they take no time."""
    program = schedule("one_f_one_b").program(2, 2)
    costs = Costs(backward=2, unshard=1)
    assert draw_text(simulate(program, costs, sharding=Sharding(True, reduces_per_microbatch=True))).splitlines() == [
        "rank 0     F0 F1       B0---    B1---",
        "        U0             S0---    R0---",
        "rank 1        F0 B0--- F1 B1---",
        "        U1       S1---    R1---",
        "",
        "F forward, B backward, I input gradients, W weight gradients",
        "second rows: U a stage's weights are gathered, R its gradients reduced, S those so far",
    ]
    free = draw_text(simulate(program, Costs(backward=2), sharding=Sharding(True))).splitlines()
    assert free[1].startswith("        U0 ") and "F0" in free[0]


def test_a_measured_timeline_is_under_the_simulated_one() -> None:
    """A row under each rank's own, on the same scale."""
    program = parse_program("0: 0F0 0B0\n1: 1F0 1B0\n")
    simulated, late = simulate(program, Costs()), simulate(program, Costs(comm=1))
    lines = draw_text(simulated, measured=late).splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["rank", "measured", "rank", "measured"]
    assert lines[3].index("F0") - lines[2].index("F0") == lines[2].index("B0") - lines[2].index("F0")


def test_transfers_have_a_row_for_each_direction() -> None:
    """Offloads and reloads are drawn below their rank, at their time, with a legend."""
    program = attrs.evolve(parse_program("0: 0F0 0F1 0F2 0B0 0B1 0B2\n"), offloaded=frozenset({0}))
    assert draw_text(simulate(program, Costs(offload=1.0))).splitlines() == [
        "rank 0  F0 F1 F2 B0--- B1--- B2---",
        "           >0 >1 >2",
        "              <0 <1    <2",
        "",
        "F forward, B backward, I input gradients, W weight gradients",
        "rows of the link: > activations leave for host memory, < they return",
    ]
