"""The durations of ops."""

from drawloom.components.pipeline.program.timing import Costs
from support.schedules import parse_program


def test_a_whole_backward_costs_its_parts() -> None:
    """B lasts as long as I and W together, unless its duration is set."""
    assert Costs(1, 2, 3).backward == 5
    assert Costs(1, 2, 3, 4).get_duration("B") == 4
    assert [Costs(1, 2, 3, comm=0.5).get_duration(op) for op in ("F", "I", "W", "SEND_F", "RECV_B")] == [
        1,
        2,
        3,
        0.5,
        0.5,
    ]


def test_a_stages_factor_scales_its_ops() -> None:
    """A stage's ops take its factor longer, in a single duration and in a program; messages do not."""
    costs = Costs(1, 2, 3, comm=0.5, factors=(1.0, 1.5))
    assert [costs.get_duration(op, 1) for op in ("F", "I", "W", "B", "SEND_B")] == [1.5, 3, 4.5, 7.5, 0.5]
    program = parse_program("0: 0F0 0I0 0W0\n1: 1F0 1B0\n")
    assert costs.get_durations(program).tolist() == [1, 2, 3, 1.5, 7.5]
