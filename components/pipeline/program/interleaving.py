"""Op codes of schedules whose ranks run several stages in turn."""

from drawloom.components.pipeline.program.builders import OpCodes, W, encode_op
from drawloom.ports import BACKWARD, FORWARD


def split_into_rounds(ranks: int, microbatches: int) -> list[int]:
    """Return microbatch counts by round: about as many as ranks, never fewer if possible; larger rounds first."""
    # Fewer, larger rounds than ceil(microbatches / ranks): a round with fewer microbatches than ranks has a bubble.
    count = max(1, microbatches // ranks)
    share, left = divmod(microbatches, count)
    return [share + 1] * left + [share] * (count - left)


def list_op_codes_in_rounds(op: int, sizes: list[int], stages: range) -> OpCodes:
    """Return op codes for all rounds, one after another; a round runs all its microbatches stage by stage."""
    return [encode_op(op, local_stage) for size in sizes for local_stage in stages for _ in range(size)]


def build_interleaved_op_codes(
    rank: int,
    ranks: int,
    stages: int,
    microbatches: int,
    backward_op: int,
    warmup_per_later_rank: int,
    weight_grad_lag: int | None = None,
) -> OpCodes:
    """
    Return a rank's op codes of interleaved 1F1B with `backward_op`, `BACKWARD` or `BACKWARD_INPUT`.

    The k-th rank before the last warms up with `warmup_per_later_rank * k` more forward passes. With `weight_grad_lag`,
    weight gradients are deferred: from backward pass number `weight_grad_lag` on, every one is followed by the oldest
    pending weight gradients.
    """
    sizes = split_into_rounds(ranks, microbatches)
    forwards = list_op_codes_in_rounds(FORWARD, sizes, range(stages))
    backwards = list_op_codes_in_rounds(backward_op, sizes, range(stages)[::-1])
    # The first backward pass needs the first round's forward passes of all local stages, then some per later rank.
    ahead = (stages - 1) * sizes[0] + warmup_per_later_rank * (ranks - 1 - rank)
    row = forwards[:ahead]
    for number, backward in enumerate(backwards):
        row += forwards[ahead + number : ahead + number + 1]
        row.append(backward)
        if weight_grad_lag is not None and number >= weight_grad_lag:
            row.append(W)
    return row if weight_grad_lag is None else row + [W] * min(weight_grad_lag, len(backwards))


def build_breadth_first_op_codes(stages: int, microbatches: int) -> OpCodes:
    """Return every rank's breadth-first op codes: all microbatches through one stage after another, then all back."""
    forwards = list_op_codes_in_rounds(FORWARD, [microbatches], range(stages))
    return forwards + list_op_codes_in_rounds(BACKWARD, [microbatches], range(stages)[::-1])
