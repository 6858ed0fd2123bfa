"""V-Min."""

from drawloom.components.pipeline.program.timing import Costs
from drawloom.components.pipeline.schedules.v_min import VMin
from drawloom.components.pipeline.simulation.simulator import simulate


def test_the_first_microbatch_follows_the_papers_figure() -> None:
    """No op in the first microbatch waits: it directly follows the neighbour's."""
    run = simulate(VMin().program(4, 8), Costs())
    starts = {str(bar.action): bar.start for rank in range(4) for bar in run.iterate_bars(rank)}
    assert [starts[f"{stage}F0"] for stage in range(8)] == list(range(8))
    assert [starts[f"{stage}I0"] for stage in reversed(range(8))] == list(range(8, 16))


def test_memory_is_a_third_of_1f1b() -> None:
    """A rank holds at most p / 3 + 1 microbatches, for any number of ranks."""
    for ranks in range(1, 20):
        run = simulate(VMin().program(ranks, 2 * ranks), Costs())
        assert max(run.peak_activations) / 2 <= ranks / 3 + 1
