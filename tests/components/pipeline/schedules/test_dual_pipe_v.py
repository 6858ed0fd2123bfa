"""DualPipeV; tests/schedules/test_torch.py compares its order with torch's."""

from drawloom.components.pipeline.program.lowering import lower_to_rank_program
from drawloom.components.pipeline.program.timing import Costs
from drawloom.components.pipeline.schedules.dual_pipe_v import DualPipeV
from drawloom.components.pipeline.simulation.simulator import simulate
from drawloom.components.ports.program import Overlap


def test_forwards_leave_before_the_backwards_that_they_overlap() -> None:
    """In every overlap the forward's output is sent before the backward starts."""
    for rank in range(4):
        for item in lower_to_rank_program(DualPipeV().program(4, 8), rank):
            if isinstance(item, Overlap):
                works = [part.op for part in item.parts]
                assert works[0] == "F" and works[-1] == "B"
                assert item.parts[0].stage in (0, 7) or "SEND_F" in works or (rank, item.parts[0].stage) == (3, 3)


def test_a_forward_in_an_overlap_is_sent_early() -> None:
    """Because a forward's output does not wait for the backward, the skew of ranks is p - 1, not 2 (p - 1)."""
    for ranks in (2, 4, 8):
        assert simulate(DualPipeV().program(ranks, 4 * ranks), Costs()).makespan == 24 * ranks + ranks - 1


def test_few_microbatches_are_valid() -> None:
    """With fewer than two microbatches a rank, the step takes no longer than with whole backwards."""
    for microbatches in range(1, 8):
        run = simulate(DualPipeV().program(4, microbatches), Costs())
        assert run.makespan <= 6 * (microbatches + 3)
