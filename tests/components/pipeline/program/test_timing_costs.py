"""The durations of ops."""

from drawloom.components.pipeline.program.timing import Costs


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
