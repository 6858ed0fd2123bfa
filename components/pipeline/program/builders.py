"""Programs built from rows of op codes, as in the figures of papers: microbatch numbers follow from the order."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from drawloom.components.ports.program import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Program


def loop(ranks: int, stages_per_rank: int = 1) -> tuple[int, ...]:
    """The rank of each stage in a loop: the stage after the last rank's is on the first rank again."""
    return tuple(range(ranks)) * stages_per_rank


def vee(ranks: int) -> tuple[int, ...]:
    """
    The rank of each stage in a V, two stages a rank.

    The last rank holds two consecutive stages, the first rank the first and the last stage of the model.
    """
    return (*range(ranks), *reversed(range(ranks)))


def stages_of(rank: int, stage_to_rank: tuple[int, ...]) -> list[int]:
    """A rank's stages, in order."""
    return [stage for stage, owner in enumerate(stage_to_rank) if owner == rank]


Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

Row = list[int]
"""One rank's op codes, in order. They are plain integers, which numpy handles fast for thousands of microbatches."""

_SECOND = 1 << 32
"""The op code of an overlap is its first op code plus its second times this."""


def forward(local_stage: int) -> int:
    """The op code of a forward of a rank's n-th stage (`local_stage`, from 0)."""
    # 4 ops for each local stage; the offset of 4 leaves 0 to 3 for local stage -1, any stage of the rank (W).
    return 4 * local_stage + FORWARD + 4


def backward(local_stage: int) -> int:
    """The op code of a full backward."""
    return 4 * local_stage + BACKWARD + 4


def backward_input(local_stage: int) -> int:
    """The op code of the input gradients."""
    return 4 * local_stage + BACKWARD_INPUT + 4


def backward_weight(local_stage: int) -> int:
    """The op code of the oldest pending weight gradients of this stage."""
    return 4 * local_stage + BACKWARD_WEIGHT + 4


F0, F1 = forward(0), forward(1)
B0, B1 = backward(0), backward(1)
I0, I1 = backward_input(0), backward_input(1)
W0, W1 = backward_weight(0), backward_weight(1)
W = backward_weight(-1)
"""The op code of the oldest pending weight gradients of any stage of the rank."""


def overlap(first: int, second: int) -> int:
    """The op code of two ops that may run concurrently."""
    return first + second * _SECOND


def build_program(
    rows: Sequence[Row], stage_to_rank: tuple[int, ...], microbatches: int, *, newest_first: bool = False
) -> Program:
    """
    The program with a row of op codes for each rank.

    The n-th forward of a stage is that of microbatch n, and so for backwards; with `newest_first` these take the
    microbatches from the last to the first. Actions of surplus microbatches are dropped.
    """
    stages = np.argsort(np.array(stage_to_rank), kind="stable").reshape(len(rows), -1)
    counted = [_number_microbatches(np.array(row, dtype=np.int64)) for row in rows]
    local_stage, op, microbatch, overlaps = (np.concatenate(column) for column in zip(*counted, strict=True))
    bounds = np.concatenate([[0], np.cumsum([len(line[0]) for line in counted])])
    stage = stages[np.repeat(np.arange(len(rows)), np.diff(bounds)), local_stage]
    # Microbatches were numbered in the order of a row, so reversing backwards is a change of numbers alone.
    if newest_first:
        microbatch[op != FORWARD] = microbatches - 1 - microbatch[op != FORWARD]
    program = Program(
        stage_to_rank, microbatches, bounds, stage=stage, op=op, microbatch=microbatch, overlaps_previous=overlaps
    )
    return program if (microbatch < microbatches).all() else program.select(microbatch < microbatches)


class RowSchedule(ABC):
    """A schedule in which each rank's row follows from its number; with `newest_first` backwards are in reverse."""

    newest_first: ClassVar[bool] = False

    @abstractmethod
    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        """The rank of each stage."""

    @abstractmethod
    def row(self, rank: int, ranks: int, microbatches: int) -> Row:
        """The op codes of one rank, in order."""

    def program(self, ranks: int, microbatches: int) -> Program:
        """The actions of every rank, in order."""
        return self.program_of(range(ranks), ranks, microbatches)

    def program_of(self, wanted: Collection[int], ranks: int, microbatches: int) -> Program:
        """The same program with the actions of some ranks alone."""
        rows = [self.row(rank, ranks, microbatches) if rank in wanted else [] for rank in range(ranks)]
        return build_program(rows, self.stage_to_rank(ranks), microbatches, newest_first=self.newest_first)


def _number_microbatches(op_codes: Ints) -> tuple[Ints, Ints, Ints, Bools]:
    """Local stage, op, microbatch and whether it overlaps the previous action, for each action of a row."""
    op_codes, overlaps = _split_overlaps(op_codes)
    local_stage, op = op_codes // 4 - 1, op_codes % 4
    microbatch = np.zeros_like(local_stage)
    for number in range(local_stage.max(initial=-1) + 1):
        for kind in (op == FORWARD, (op == BACKWARD) | (op == BACKWARD_INPUT)):
            places = np.flatnonzero(kind & (local_stage == number))
            microbatch[places] = np.arange(len(places))
        of_stage = local_stage == number
        _match_weight_grads(
            local_stage, microbatch, of_stage & (op == BACKWARD_INPUT), of_stage & (op == BACKWARD_WEIGHT)
        )
    _match_weight_grads(local_stage, microbatch, op == BACKWARD_INPUT, local_stage == -1)
    return local_stage, op, microbatch, overlaps


def _split_overlaps(op_codes: Ints) -> tuple[Ints, Bools]:
    """Overlaps as two op codes each, the second marked as overlapping the first."""
    second, first = np.divmod(op_codes, _SECOND)
    if not second.any():
        return op_codes, np.zeros(len(op_codes), dtype=bool)
    pairs = np.stack([first, second], axis=1).ravel()
    overlaps = np.tile([False, True], len(op_codes))
    return pairs[pairs > 0], overlaps[pairs > 0]


def _match_weight_grads(local_stage: Ints, microbatch: Ints, input_grads: Bools, weight_grads: Bools) -> None:
    """Give the n-th of these weight gradients the stage and microbatch of the n-th of these input gradients."""
    produced, consumed = np.flatnonzero(input_grads), np.flatnonzero(weight_grads)
    local_stage[consumed], microbatch[consumed] = (
        local_stage[produced[: len(consumed)]],
        microbatch[produced[: len(consumed)]],
    )


def rounds(ranks: int, microbatches: int) -> list[int]:
    """The microbatches of each round: as many as ranks or a few more, with the larger rounds first."""
    # Fewer, larger rounds than ceil(microbatches / ranks): a round with fewer microbatches than ranks has a bubble.
    count = max(1, microbatches // ranks)
    share, left = divmod(microbatches, count)
    return [share + 1] * left + [share] * (count - left)


def in_rounds(op_code: Callable[[int], int], sizes: list[int], stages: range) -> Row:
    """The op codes of each round through a rank's stages, in the order given."""
    return [op_code(local_stage) for size in sizes for local_stage in stages for _ in range(size)]


def interleaved(
    rank: int,
    ranks: int,
    stages: int,
    microbatches: int,
    op_code: Callable[[int], int],
    lead: int,
    lag: int | None = None,
) -> Row:
    """
    One rank's row of interleaved 1F1B. `op_code` gives that of a backward of a local stage.

    The rank that is k before the last one warms up with `lead * k` more forwards. With `lag`, weight gradients are
    deferred: from the backward with that number on, each backward is followed by the oldest pending one.
    """
    sizes = rounds(ranks, microbatches)
    forwards = in_rounds(forward, sizes, range(stages))
    backwards = in_rounds(op_code, sizes, range(stages)[::-1])
    # The first backward needs the first round's forwards of all local stages, then `lead` for each rank after it.
    ahead = (stages - 1) * sizes[0] + lead * (ranks - 1 - rank)
    row = forwards[:ahead]
    for number, backward in enumerate(backwards):
        row += forwards[ahead + number : ahead + number + 1]
        row.append(backward)
        if lag is not None and number >= lag:
            row.append(W)
    return row if lag is None else row + [W] * min(lag, len(backwards))


def breadth_first(stages: int, microbatches: int) -> Row:
    """Each rank's row of breadth-first: all microbatches through one stage after another, then all backward."""
    row = [forward(local_stage) for local_stage in range(stages) for _ in range(microbatches)]
    return row + [backward(local_stage) for local_stage in reversed(range(stages)) for _ in range(microbatches)]


def forward_only(stage_to_rank: Sequence[int], microbatches: int) -> Program:
    """
    Forwards alone: each microbatch is one stage behind the previous one.

    If several stages of a rank are due at the same time, the last one comes first, so that the oldest microbatch
    finishes first.
    """
    places = [(stage, number) for stage in range(len(stage_to_rank)) for number in range(microbatches)]
    places.sort(key=lambda place: (place[0] + place[1], -place[0]))
    lines: list[list[Action]] = [[] for _ in range(max(stage_to_rank) + 1)]
    for stage, number in places:
        lines[stage_to_rank[stage]].append(Action(stage, "F", number))
    return Program.of(lines, stage_to_rank)
