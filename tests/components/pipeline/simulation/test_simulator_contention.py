"""Simulation of messages on shared channels."""

import pytest

from drawloom.components.pipeline.program.lowering import insert_offload_actions
from drawloom.components.pipeline.program.timing import Costs, DeadlockError
from drawloom.components.pipeline.simulation.simulator import Channels, simulate_events
from drawloom.components.ports.program import Action, RankProgram
from support.schedules import parse_program


def line(rank: int, text: str) -> RankProgram:
    """Return the program of one of two ranks, from labels; stage s belongs to rank s mod 2."""
    works = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "F", "B")
    made: RankProgram = []
    for label in text.split():
        work = next(work for work in works if work in label)
        stage, microbatch = map(int, label.split(work))
        made.append(Action(stage, work, microbatch, None if len(work) == 1 else 1 - rank))  # type: ignore[arg-type]
    return made


CROSSED = ["0F0 0SEND_F0 0RECV_B0", "1B0 1SEND_B0 1RECV_F0"]


@pytest.mark.parametrize(("channels", "stuck"), [("free", False), ("direction", False), ("pair", True), ("rank", True)])
def test_crossed_messages_need_a_channel_each(channels: Channels, stuck: bool) -> None:
    """Two ranks that both send first deadlock if both directions share a channel, and only then."""
    lines = [line(rank, text) for rank, text in enumerate(CROSSED)]
    if stuck:
        with pytest.raises(DeadlockError, match="events wait for one another: 0SEND_F0"):
            simulate_events(lines, Costs(), channels)
    else:
        assert len(simulate_events(lines, Costs(), channels)) == 4


def test_blocking_ranks_do_not_compute_while_sending() -> None:
    """A blocking rank does not compute while it sends, and deadlocks if both ranks send to each other."""
    lines = [line(0, "0F0 0SEND_F0 0F1"), line(1, "1F5 1F6 1RECV_F0 1F0")]
    costs = Costs(comm=0.5)
    assert simulate_events(lines, costs, "direction")[0, "F", 1].start == 1
    assert simulate_events(lines, costs, "blocking")[0, "F", 1].start == 2.5
    with pytest.raises(DeadlockError):
        simulate_events([line(rank, text) for rank, text in enumerate(CROSSED)], costs, "blocking")


def test_messages_of_one_channel_follow_one_another() -> None:
    """Two messages ready at the same time take twice as long on one channel."""
    lines = [line(0, "0F0 2F0 0SEND_F0 2SEND_F0"), line(1, "1RECV_F0 3RECV_F0 1F0 3F0")]
    costs = Costs(comm=3)
    assert simulate_events(lines, costs, "free")[3, "F", 0].start == 6
    assert simulate_events(lines, costs, "direction")[3, "F", 0].start == 8


def test_messages_wait_for_their_receive() -> None:
    """A transfer starts when its receive is posted, after the actions before it."""
    costs = Costs(comm=0.5)
    late = simulate_events([line(0, "0F0 0SEND_F0"), line(1, "1F7 1F8 1RECV_F0 1F0")], costs)
    early = simulate_events([line(0, "0F0 0SEND_F0"), line(1, "1RECV_F0 1F7 1F8 1F0")], costs)
    assert (late[0, "SEND_F", 0].start, late[1, "F", 0].start) == (2, 2.5)
    assert (early[0, "SEND_F", 0].start, early[1, "F", 0].start) == (1, 2)


def test_transfers_share_a_direction_of_the_link_and_delay_passes() -> None:
    """
    Copies in one direction follow one another; the second pass after a forward waits for its copy, and a backward for
    the way back. Free copies change nothing.
    """
    line = parse_program("0: 0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3\n").rank_program(0)
    rank_program = insert_offload_actions(line, {0})
    fast, slow = (simulate_events([rank_program], Costs(offload=seconds)) for seconds in (0.5, 1.5))
    assert [fast[0, "F", number].start for number in range(4)] == [0, 1, 2, 3]
    assert (fast[0, "RELOAD", 0].start, fast[0, "B", 0].start, fast[0, "B", 3].end) == (3, 4, 12)
    # F2 waits until microbatch 0 has left at 2.5, and F3 for microbatch 1, until 4.
    assert [slow[0, "OFFLOAD", number].start for number in (0, 1, 2)] == [1, 2.5, 4]
    assert [slow[0, "F", number].start for number in range(4)] == [0, 1, 2.5, 4]
    assert (slow[0, "RELOAD", 0].start, slow[0, "B", 0].start) == (3.5, 5.5)
