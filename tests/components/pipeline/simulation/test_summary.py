"""The figures of simulations as JSON and text."""

import attrs

from drawloom.components.commands.planning.schedule import ScheduleData
from drawloom.components.pipeline.program.timing import Costs
from drawloom.components.pipeline.simulation.simulator import simulate
from drawloom.components.pipeline.simulation.summary import Summary, format_comparison
from support.schedules import schedule


def summary(name: str, ranks: int = 4, microbatches: int = 8) -> Summary:
    """Return a schedule, simulated."""
    program = schedule(name).program(ranks, microbatches)
    return Summary(name, simulate(program, Costs().divide_by_stages(program.stages // ranks)))


def test_json_has_the_figures_of_the_simulation() -> None:
    """The data for JSON has these keys and values."""
    assert vars(ScheduleData.from_summary(summary("zero_bubble_h2"))) == {
        "schedule": "zero_bubble_h2",
        "ranks": 4,
        "stages_per_rank": 1,
        "microbatches": 8,
        "makespan": 27.0,
        "ideal": 24.0,
        "bubble": 1 - 24 / 27,
        "span_bubble": 0.0,
        "peak_activations": [7, 5, 3, 1],
        "peak_live_weights": [7, 7, 7, 7],
        "messages": 48,
        "actions": {"F": 32, "B": 0, "I": 32, "W": 32},
        "shard_actions": [],
        "transfers": [],
        **dict.fromkeys(("choice", "recompute", "measured_makespan", "activation_bytes")),
    }


def test_recomputation_is_reported() -> None:
    """It is in the caption of text and picture, and in JSON, if a program has recomputation."""
    program = attrs.evolve(schedule("one_f_one_b").program(2, 2), recompute=("blocks", "none"))
    summary = Summary("mine", simulate(program, Costs()))
    assert summary.caption.endswith("; recomputed: blocks in stage 0")
    assert ScheduleData.from_summary(summary).recompute == ["blocks", "none"]


def test_titles_use_singular_and_plural() -> None:
    """A count of 1 has the singular."""
    assert summary("gpipe", 1, 1).title == "gpipe: 1 rank × 1 stage, 1 microbatch"
    assert summary("v_min").title == "v_min: 4 ranks × 2 stages, 8 microbatches"


def test_the_caption_has_makespan_and_span() -> None:
    """The caption names both lengths with their bubbles."""
    wanted = "makespan 27, ideal 24: bubble 11.1%; longest span of a rank 24: bubble 0.0%"
    assert summary("zero_bubble_h2").caption == wanted


def test_peaks_by_rank_are_a_table() -> None:
    """The table has a row with peaks for every rank."""
    assert summary("one_f_one_b", 2, 4).format_peaks_by_rank().splitlines() == [
        "peak    live  until weights  weights pending  messages",
        "rank 0     2              2                0         1",
        "rank 1     1              1                0         2",
    ]


def test_schedules_are_sorted_by_makespan() -> None:
    """Schedules are sorted by makespan, then by memory."""
    rows = format_comparison([summary(name) for name in ("gpipe", "one_f_one_b", "zero_bubble_v")]).splitlines()
    assert [row.split()[0] for row in rows[:4]] == ["schedule", "zero_bubble_v", "one_f_one_b", "gpipe"]
    assert rows[1].split()[1:] == ["2", "25.5", "24", "5.9%", "0.0%", "8", "8", "4", "96"]
