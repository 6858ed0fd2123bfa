"""Lowering: messages in programs."""

from drawloom.components.pipeline.program.lowering import lower, with_shard_actions
from drawloom.components.pipeline.program.notation import read_program


def lowered(text: str, rank: int) -> str:
    """A rank's lowered program, as text."""
    return " ".join(map(str, lower(read_program(text), rank)))


def test_messages_are_inserted() -> None:
    """A send follows its producer directly, a receive precedes the action during which its message arrives."""
    text = "0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1\n"
    assert lowered(text, 0) == "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    assert lowered(text, 1) == "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1"


def test_messages_know_their_peers() -> None:
    """Sends and receives name the rank on the other side, by the placement of the program."""
    line = lower(read_program("0: 0F0 3F0 3B0 0B0\n1: 1F0 2F0 2B0 1B0\n"), 1)
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
    overlap = next(word for word in lowered(text, 1).split() if word.startswith("1F1"))
    parts = overlap.split("|")
    assert parts.index("1F1") < parts.index("1SEND_F1") < parts.index("1B0") == len(parts) - 1


def test_split_backwards_are_merged_if_no_rank_waits() -> None:
    """I and a following W become B on stage 0, and if the previous stage is on the same rank; else they stay."""
    text = "0: 0F0 0I0 0W0\n1: 1F0 2F0 2I0 2W0 1I0 1W0\n"
    assert lowered(text, 0) == "0F0 0SEND_F0 0RECV_B0 0B0"
    assert lowered(text, 1) == "1RECV_F0 1F0 2F0 2B0 1I0 1SEND_B0 1W0"


def test_separated_backwards_stay_split() -> None:
    """I and W with another action between them stay split."""
    assert lowered("0: 0F0 0F1 0I0 0I1 0W0 0W1\n", 0) == "0F0 0F1 0I0 0I1 0W0 0W1"
    assert lowered("0: 0F0 0F1 0I0 0I1 0W1 0W0\n", 0) == "0F0 0F1 0I0 0B1 0W0"


def test_sharded_stages_are_gathered_early_and_reduced_with_their_last_backward() -> None:
    """A stage is gathered one compute action before its first, and its gradients are reduced with its last."""
    line = lower(read_program("0: 0F0 2F0 0F1 2F1 2I0 2W0 2B1 0B0 0B1\n1: 1F0 1F1 1B0 1B1\n"), 0)
    found = [str(action) for action in with_shard_actions(line, {0, 2}, {0, 2}) if "_F" not in str(action)]
    compute = [name for name in found if "SEND" not in name and "RECV" not in name]
    assert " ".join(compute) == ("0UNSHARD0 2UNSHARD0 0F0 2F0 0F1 2F1 2I0 2W0 2REDUCE_GRAD1 2B1 0B0 0REDUCE_GRAD1 0B1")


def test_forwards_alone_free_what_they_gathered() -> None:
    """Without a backward a gathered stage is freed after its last forward, and nothing is reduced."""
    line = with_shard_actions(lower(read_program("0: 0F0 0F1 1F0 1F1\n"), 0), {0, 1}, {0, 1})
    assert " ".join(map(str, line)) == "0UNSHARD0 0F0 1UNSHARD0 0F1 0RESHARD1 1F0 1F1 1RESHARD1"


def test_stages_that_gather_by_block_are_only_reduced() -> None:
    """Blocks gather themselves when they are used."""
    line = with_shard_actions(lower(read_program("0: 0F0 0B0 0F1 0B1\n"), 0), set(), {0})
    assert " ".join(map(str, line)) == "0F0 0B0 0F1 0REDUCE_GRAD1 0B1"


def test_gradients_are_reduced_with_each_backward_of_weights_where_memory_is_short() -> None:
    """Each B and W but the last adds gradients to slices; I, which computes none, does not."""
    line = with_shard_actions(
        lower(read_program("0: 0F0 0F1 0F2 0B0 0I1 0F3 0W1 0B3 0I2 0F4 0W2 0B4\n"), 0), {0}, {0}, {0}
    )
    assert " ".join(map(str, line)) == (
        "0UNSHARD0 0F0 0F1 0F2 0REDUCE_SCATTER0 0B0 0I1 0F3 0REDUCE_SCATTER1 0W1 0REDUCE_SCATTER3 0B3 0I2 0F4 "
        "0REDUCE_SCATTER2 0W2 0REDUCE_GRAD4 0B4"
    )
