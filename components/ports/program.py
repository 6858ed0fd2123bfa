"""Actions and programs for pipeline ranks."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import attrs
import numpy as np
from numpy.typing import NDArray

from drawloom.components.ports.stages import Recompute

Op = Literal["F", "B", "I", "W"]
MessageOp = Literal["SEND_F", "RECV_F", "SEND_B", "RECV_B"]
ShardOp = Literal["UNSHARD", "RESHARD", "REDUCE_SCATTER", "REDUCE_GRAD"]
TransferOp = Literal["OFFLOAD", "RELOAD"]

OPS: tuple[Op, ...] = ("F", "B", "I", "W")
"""Compute ops; the index of an op is its number in a program's columns."""

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = range(4)


@attrs.frozen
class Action:
    """
    One operation on a rank, for one stage and one microbatch; written `3F7` (stage, op, microbatch).

    Compute ops are forward (F) and backward (B), or a split backward: gradients for the stage's inputs (I), then for
    its weights (W). Message ops carry an output to the next stage (SEND_F, RECV_F) or a gradient to the previous stage
    (SEND_B, RECV_B); `stage` is this rank's stage, `peer` the rank on the other side.

    Shard ops gather a stage's sharded parameters (UNSHARD), free them (RESHARD), add the gradients so far to the ranks'
    slices (REDUCE_SCATTER), or announce that the stage's next backward makes gradients final and reduces them
    (REDUCE_GRAD); `microbatch` belongs to the compute op that they serve.

    Transfer ops start to copy a microbatch's activations to host memory after its forward (OFFLOAD), and back before
    its backward (RELOAD). Device memory is freed before the second compute op after OFFLOAD, after the copy.
    """

    stage: int
    op: Op | MessageOp | ShardOp | TransferOp
    microbatch: int
    peer: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


@attrs.frozen
class Overlap:
    """Actions that may run concurrently, each as soon as its inputs have arrived; written `3F7|4B2`."""

    parts: tuple[Action, ...]

    def __str__(self) -> str:
        return "|".join(map(str, self.parts))


RankProgram = list[Action | Overlap]
"""The actions of one rank, in order."""


@attrs.frozen(eq=False)
class Program:
    """
    Compute actions for all ranks, in order, without sends and receives.

    The ranks' programs are concatenated in equally long columns, one row per action: its `stage`, its `op` as an index
    into OPS, its `microbatch`, and whether it `overlaps_previous`. Rank r has rows `bounds[r]` to `bounds[r + 1]`.
    `stage_to_rank` has ranks by stage, and `recompute` activation checkpointing policies by stage; if `recompute` is
    empty, the stages' own policies apply. The activations of the stages in `offloaded` wait in host memory. If a
    schedule has compared others, `choice` names the one whose program this is, or "search".
    """

    stage_to_rank: tuple[int, ...]
    microbatches: int
    bounds: NDArray[np.int64]
    stage: NDArray[np.int64]
    op: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    overlaps_previous: NDArray[np.bool_]
    recompute: tuple[Recompute, ...] = ()
    offloaded: frozenset[int] = frozenset()
    choice: str = ""

    @classmethod
    def from_rank_programs(
        cls,
        rank_programs: Sequence[Iterable[Action | Overlap]],
        stage_to_rank: Sequence[int] | None = None,
        recompute: Sequence[Recompute] = (),
    ) -> "Program":
        """
        Return a program from the ranks' actions. Without `stage_to_rank`, a stage belongs to the rank that works on
        it.

        Raises ValueError for a message action, for a stage on which several ranks or no ranks work, for an unknown
        recompute policy, and if there is not one policy per stage.
        """
        parts = [
            [_encode_action(part, joined) for item in line for part, joined in _list_actions_with_overlap_flags(item)]
            for line in rank_programs
        ]
        rows = [row for line in parts for row in line]
        stage, work, microbatch, joined = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        bounds = np.cumsum([0, *map(len, parts)])
        stage_to_rank = _find_stage_to_rank(parts) if stage_to_rank is None else tuple(stage_to_rank)
        if fault := _find_policy_fault(recompute, len(stage_to_rank)):
            raise ValueError(f"recompute = {tuple(recompute)}: {fault}")
        return cls(
            stage_to_rank=stage_to_rank,
            microbatches=int(microbatch.max(initial=-1)) + 1,
            bounds=bounds,
            stage=stage,
            op=work,
            microbatch=microbatch,
            overlaps_previous=joined.astype(bool),
            recompute=tuple(recompute),
        )

    @property
    def ranks(self) -> int:
        return len(self.bounds) - 1

    @property
    def stages(self) -> int:
        return len(self.stage_to_rank)

    @property
    def rank_by_action(self) -> NDArray[np.int64]:
        """Ranks by action, in column order: int64 (actions,)."""
        return np.repeat(np.arange(self.ranks), np.diff(self.bounds))

    def rows(self, rank: int) -> slice:
        """Return the slice of the columns with a rank's actions."""
        return slice(int(self.bounds[rank]), int(self.bounds[rank + 1]))

    def rank_program(self, rank: int) -> RankProgram:
        """Return a rank's actions, in order."""
        return group_overlaps(
            (self.action(row), bool(self.overlaps_previous[row])) for row in range(*self.bounds[rank : rank + 2])
        )

    def action(self, row: int) -> Action:
        """Return the action in a row."""
        return Action(int(self.stage[row]), OPS[self.op[row]], int(self.microbatch[row]))

    def select_actions(self, kept: NDArray[np.bool_]) -> "Program":
        """Return the same program with the `kept` actions only; an overlap's remainder is an action by itself."""
        # An action does not overlap any earlier action if its direct predecessor is dropped.
        before = np.concatenate([[False], kept[:-1]])
        bounds = np.concatenate([[0], np.cumsum(kept)])[self.bounds]
        columns = {name: getattr(self, name)[kept] for name in ("stage", "op", "microbatch")}
        return attrs.evolve(self, bounds=bounds, overlaps_previous=(self.overlaps_previous & before)[kept], **columns)


def iterate_actions(line: RankProgram) -> Iterator[Action]:
    """Yield the actions one by one, without their grouping in overlaps."""
    for item in line:
        yield from item.parts if isinstance(item, Overlap) else (item,)


def group_overlaps(actions: Iterable[tuple[Action, bool]]) -> RankProgram:
    """Return a rank's program from actions with flags, which are True if an action overlaps the previous one."""
    groups: list[list[Action]] = []
    for action, joined in actions:
        if joined:
            groups[-1].append(action)
        else:
            groups.append([action])
    return [group[0] if len(group) == 1 else Overlap(tuple(group)) for group in groups]


def _list_actions_with_overlap_flags(item: Action | Overlap) -> Iterable[tuple[Action, bool]]:
    """Return the actions in an item, with a flag: whether the action overlaps the one before."""
    if isinstance(item, Action):
        return [(item, False)]
    return [(part, number > 0) for number, part in enumerate(item.parts)]


def _encode_action(action: Action, joined: bool) -> tuple[int, int, int, bool]:
    """Return an action as numbers for the columns: stage, op index, microbatch, `joined`. ValueError for a message."""
    if action.op not in OPS:
        raise ValueError(
            f"{action} sends or receives a message; a program may only contain the compute ops {', '.join(OPS)}"
        )
    return action.stage, OPS.index(action.op), action.microbatch, joined


def _find_policy_fault(policies: Sequence[Recompute], stages: int) -> str | None:
    """Return a fault in the recompute policies: their number, or an unknown one; else None."""
    if policies and len(policies) != stages:
        return f"there are {stages} stages; write a policy for each, or for none"
    for policy in policies:
        if policy not in ("none", "selective", "quantized", "blocks") and not (isinstance(policy, int) and policy > 0):
            known = "'none', 'selective', 'quantized', 'blocks', or n for one of n blocks"
            return f"{policy!r} is not a policy; write {known}"
    return None


def _find_stage_to_rank(rank_programs: Sequence[Sequence[tuple[Any, ...]]]) -> tuple[int, ...]:
    """Return ranks by stage. Raises ValueError for a stage on which several ranks or no ranks work."""
    pairs = sorted({(row[0], rank) for rank, line in enumerate(rank_programs) for row in line})
    stage_to_rank = dict(pairs)
    for stage, rank in pairs:
        if stage_to_rank[stage] != rank:
            raise ValueError(f"ranks {rank} and {stage_to_rank[stage]} both work on stage {stage}")
    if sorted(stage_to_rank) != list(range(len(stage_to_rank))):
        missing = min(set(range(len(stage_to_rank))) - set(stage_to_rank))
        raise ValueError(f"no rank works on stage {missing}; number the stages from 0 without gaps")
    return tuple(stage_to_rank[stage] for stage in range(len(stage_to_rank)))
