"""Lowering: messages in programs."""

from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise, product
from typing import Any

import pytest

from drawloom.components.pipeline.program.builders import build_program_with_neighbours
from drawloom.components.pipeline.program.lowering import (
    check_ranks_agree_on_program,
    insert_offload_actions,
    insert_shard_actions,
    lower_to_rank_program,
    merge_split_backwards,
)
from drawloom.components.ports.pipeline import PartialSchedule
from drawloom.components.ports.program import OPS, RankProgram, iterate_actions
from drawloom.graph import UserError
from support.schedules import NAMES, parse_program, variants


def lower_text(text: str, rank: int) -> str:
    """Return a rank's lowered program, as text."""
    return " ".join(map(str, lower_to_rank_program(parse_program(text), rank)))


def test_messages_are_inserted() -> None:
    """A send follows its producer directly, a receive precedes the action during which its message arrives."""
    text = "0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1\n"
    assert lower_text(text, 0) == "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    assert lower_text(text, 1) == "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1"


def test_messages_know_their_peers() -> None:
    """Sends and receives name the rank on the other side, by the placement of the program."""
    line = lower_to_rank_program(parse_program("0: 0F0 3F0 3B0 0B0\n1: 1F0 2F0 2B0 1B0\n"), 1)
    assert [(str(action), action.peer) for action in line] == [  # type: ignore[union-attr]
        ("1RECV_F0", 0),
        ("1F0", None),
        ("2F0", None),
        ("2SEND_F0", 0),
        ("2RECV_B0", 0),
        ("2B0", None),
        ("1B0", None),
        ("1SEND_B0", 0),
    ]


def test_a_forward_leaves_before_the_backward_that_it_overlaps() -> None:
    """Messages between the parts of an overlap belong to it, and the forward's send precedes the backward."""
    text = "0: 0F0 0F1 0F2 0B0 0B1 0B2\n1: 1F0 1F1|1B0 1F2|1B1 1B2\n2: 2F0 2B0 2F1 2B1 2F2 2B2\n"
    overlap = next(word for word in lower_text(text, 1).split() if word.startswith("1F1"))
    parts = overlap.split("|")
    assert parts.index("1F1") < parts.index("1SEND_F1") < parts.index("1B0") == len(parts) - 1


def test_split_backwards_are_merged_if_no_rank_waits() -> None:
    """I and a following W become B on stage 0, and if the previous stage is on the same rank; else they stay."""
    text = "0: 0F0 0I0 0W0\n1: 1F0 2F0 2I0 2W0 1I0 1W0\n"
    assert lower_text(text, 0) == "0F0 0SEND_F0 0RECV_B0 0B0"
    assert lower_text(text, 1) == "1RECV_F0 1F0 2F0 2B0 1I0 1SEND_B0 1W0"


def test_separated_backwards_stay_split() -> None:
    """I and W with another action between them stay split."""
    assert lower_text("0: 0F0 0F1 0I0 0I1 0W0 0W1\n", 0) == "0F0 0F1 0I0 0I1 0W0 0W1"
    assert lower_text("0: 0F0 0F1 0I0 0I1 0W1 0W0\n", 0) == "0F0 0F1 0I0 0B1 0W0"


def test_sharded_stages_are_gathered_early_and_reduced_with_their_last_backward() -> None:
    """A stage is gathered one compute action before its first, and its gradients are reduced with its last."""
    line = lower_to_rank_program(parse_program("0: 0F0 2F0 0F1 2F1 2I0 2W0 2B1 0B0 0B1\n1: 1F0 1F1 1B0 1B1\n"), 0)
    actions = [str(action) for action in insert_shard_actions(line, {0, 2}, {0, 2}) if "_F" not in str(action)]
    compute = [name for name in actions if "SEND" not in name and "RECV" not in name]
    assert " ".join(compute) == ("0UNSHARD0 2UNSHARD0 0F0 2F0 0F1 2F1 2I0 2W0 2REDUCE_GRAD1 2B1 0B0 0REDUCE_GRAD1 0B1")


def test_forwards_alone_free_gathered_stages() -> None:
    """Without a backward a gathered stage is freed after its last forward, and nothing is reduced."""
    line = insert_shard_actions(lower_to_rank_program(parse_program("0: 0F0 0F1 1F0 1F1\n"), 0), {0, 1}, {0, 1})
    assert " ".join(map(str, line)) == "0UNSHARD0 0F0 1UNSHARD0 0F1 0RESHARD1 1F0 1F1 1RESHARD1"


def test_stages_that_gather_by_block_are_only_reduced() -> None:
    """Blocks gather themselves when they are used."""
    line = insert_shard_actions(lower_to_rank_program(parse_program("0: 0F0 0B0 0F1 0B1\n"), 0), set(), {0})
    assert " ".join(map(str, line)) == "0F0 0B0 0F1 0REDUCE_GRAD1 0B1"


def test_gradients_are_reduced_with_each_backward_of_weights_where_memory_is_short() -> None:
    """All B and W but the last add gradients to slices; I, without gradients to add, does not."""
    line = insert_shard_actions(
        lower_to_rank_program(parse_program("0: 0F0 0F1 0F2 0B0 0I1 0F3 0W1 0B3 0I2 0F4 0W2 0B4\n"), 0), {0}, {0}, {0}
    )
    assert " ".join(map(str, line)) == (
        "0UNSHARD0 0F0 0F1 0F2 0REDUCE_SCATTER0 0B0 0I1 0F3 0REDUCE_SCATTER1 0W1 0REDUCE_SCATTER3 0B3 0I2 0F4 "
        "0REDUCE_SCATTER2 0W2 0REDUCE_GRAD4 0B4"
    )


def test_activations_wait_in_host_memory_if_the_gap_is_long() -> None:
    """They leave after their forward pass and return one action before B or I; close passes and other stages stay."""
    text = "0: 0F0 0F1 0F2 1F0 0F3 1F1 1F2 1F3 1B0 0I0 1B1 0B1 0W0 1B2 0B2 1B3 0B3\n"
    line = insert_offload_actions(lower_to_rank_program(parse_program(text), 0), {0})
    assert " ".join(map(str, line)) == (
        "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0OFFLOAD2 1F0 0F3 0OFFLOAD3 1F1 1F2 1F3 0RELOAD0 1B0 0I0 0RELOAD1 1B1 0B1 "
        "0W0 0RELOAD2 1B2 0B2 0RELOAD3 1B3 0B3"
    )
    assert insert_offload_actions(
        lower_to_rank_program(parse_program("0: 0F0 0F1 0B0 0B1\n"), 0), {0}
    ) == lower_to_rank_program(parse_program("0: 0F0 0F1 0B0 0B1\n"), 0)


def run_without_blocking(lines: Sequence[RankProgram]) -> list[str]:
    """
    Return the messages the ranks still wait for, if sends never block and a queue links two ranks in each direction.
    Raises AssertionError if a receive gets another message than it names.
    """
    queues: dict[tuple[int, int], deque[str]] = defaultdict(deque)
    posted: dict[tuple[int, int], list[str]] = defaultdict(list)  # receives that wait, by sender and receiver
    arrived: set[str] = set()
    left = [deque(iterate_actions(line)) for line in lines]
    own = [{(action.stage, action.op, action.microbatch) for action in iterate_actions(line)} for line in lines]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(left):
            while actions:
                action = actions[0]
                key = f"{action.stage}{action.op}{action.microbatch}"
                if action.op.startswith("SEND"):
                    other = action.stage + (1 if action.op == "SEND_F" else -1)
                    name = f"{other}{action.op.replace('SEND', 'RECV')}{action.microbatch}"
                    queues[rank, action.peer or 0].append(name)
                elif action.op.startswith("RECV"):
                    posted[action.peer or 0, rank].append(key)
                else:
                    needs = "RECV_F" if action.op == "F" else "RECV_B"
                    waits = action.op != "W" and (action.stage, needs, action.microbatch) in own[rank]
                    if waits and f"{action.stage}{needs}{action.microbatch}" not in arrived:
                        break
                actions.popleft()
                moved = True
                for ends, waiting in posted.items():
                    while waiting and queues[ends]:
                        name = queues[ends].popleft()
                        assert name == waiting.pop(0)
                        arrived.add(name)
    return [str(actions[0]) for actions in left if actions]


LAYOUTS = [(1, 3), (2, 1), (2, 5), (3, 4), (4, 8), (5, 3), (6, 14)]


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_a_program_fit_together(name: str) -> None:
    """
    From its own actions and its neighbours' a rank gets its part of the program, with messages in the same order on
    both sides, so all ranks come to an end; schedules built for some ranks build only these.
    """
    for made, (ranks, microbatches) in product(variants(name, 3), LAYOUTS):
        whole = merge_split_backwards(made.program(ranks, microbatches))
        lines = []
        for rank in range(ranks):
            part = build_program_with_neighbours(made, rank, ranks, microbatches)
            lines.append(lower_to_rank_program(part, rank))
            computes = [str(action) for action in iterate_actions(lines[-1]) if action.op in OPS]
            assert computes == [str(action) for action in iterate_actions(whole.rank_program(rank))]
            if isinstance(made, PartialSchedule) and name != "v_min":
                near = {
                    neighbour for hop in pairwise(made.stage_to_rank(ranks)) if rank in hop for neighbour in hop
                } | {rank}
                assert {other for other in range(ranks) if len(part.stage[part.rows(other)])} == near
        assert run_without_blocking(lines) == []


class Group:
    """Two ranks, the other with a program with this digest."""

    size, rank = 2, 0

    def __init__(self, theirs: str) -> None:
        self.theirs = theirs

    def gather_json(self, value: Any) -> list[Any]:
        return [value, self.theirs]


def test_ranks_with_other_programs_are_found() -> None:
    """A rank compares its expected neighbour program with the neighbour's own; a difference names both."""
    program, other = (parse_program(text) for text in ("0: 0F0 0B0\n1: 1F0 1B0\n", "0: 0F0 0B0\n1: 1F0 1I0 1W0\n"))
    digests = []

    class Kept(Group):
        def gather_json(self, value: Any) -> list[Any]:
            digests.append(value)
            return [value, value]

    for rank_program in (program, other):
        kept: Any = Kept("")
        with suppress(UserError):
            check_ranks_agree_on_program(rank_program, 1, kept)
    same, different = (Group(digest) for digest in digests)
    group: Any = same
    check_ranks_agree_on_program(program, 0, group)
    group = different
    with pytest.raises(UserError, match="rank 1 of the pipeline has other actions than rank 0 expects of it"):
        check_ranks_agree_on_program(program, 0, group)
