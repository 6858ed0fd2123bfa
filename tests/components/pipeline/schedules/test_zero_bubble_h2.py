"""ZB-H2."""

from drawloom.components.pipeline.program.timing import Costs
from drawloom.components.pipeline.schedules.zero_bubble_h2 import ZeroBubbleH2
from drawloom.components.pipeline.simulation.simulator import simulate


def test_no_rank_waits_between_its_first_and_its_last_action() -> None:
    """From 2 p microbatches on, no rank waits within its span, and each holds at most 2 p - 1 microbatches."""
    for ranks in range(1, 9):
        run = simulate(ZeroBubbleH2().program(ranks, 3 * ranks), Costs())
        for rank in range(ranks):
            bars = list(run.iterate_bars(rank))
            assert bars[-1].end - bars[0].start == 9 * ranks
        assert run.peak_microbatches_in_flight == [2 * ranks - 1] * ranks
