"""V-Half."""

from drawloom.components.pipeline.program.timing import Costs
from drawloom.components.pipeline.schedules.v_half import VHalf
from drawloom.components.pipeline.simulation.simulator import simulate


def test_memory_is_half_of_1f1b() -> None:
    """A rank holds at most p / 2 + 1 microbatches until their weight gradients, for any number of ranks."""
    for ranks in range(1, 17):
        run = simulate(VHalf().program(ranks, 3 * ranks), Costs())
        assert max(run.peak_microbatches_in_flight) / 2 <= ranks / 2 + 1
