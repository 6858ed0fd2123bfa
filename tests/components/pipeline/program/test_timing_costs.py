"""The durations of ops."""

from drawloom.components.pipeline.program.timing import Costs


def test_a_whole_backward_costs_its_parts() -> None:
    """The duration of B is that of I and W, unless it is given."""
    assert Costs(1, 2, 3).backward == 5
    assert Costs(1, 2, 3, 4).length("B") == 4
    assert [Costs(1, 2, 3, comm=0.5).length(work) for work in ("F", "I", "W", "SEND_F", "RECV_B")] == [
        1,
        2,
        3,
        0.5,
        0.5,
    ]
