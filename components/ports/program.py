"""Actions and programs: what each rank of a pipeline does, in order."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import attrs
import numpy as np
from numpy.typing import NDArray

Op = Literal["F", "B", "I", "W"]
Message = Literal["SEND_F", "RECV_F", "SEND_B", "RECV_B"]

OPS: tuple[Op, ...] = ("F", "B", "I", "W")
"""Kinds of work by the number that stands for them in a program's columns."""

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = range(4)


@attrs.frozen
class Action:
    """
    One thing that a rank does, for one stage and one microbatch; written `3F7`.

    The work is a forward (F) and a backward (B), or a backward in two parts: towards the stage's inputs (I) and towards
    its weights (W). Messages are an output that goes to the next stage (SEND_F, RECV_F) and a gradient that goes to
    the stage before (SEND_B, RECV_B); `stage` is the one on this rank, and `peer` the rank on the other side.
    """

    stage: int
    op: Op | Message
    microbatch: int
    peer: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


@attrs.frozen
class Overlap:
    """Actions that may run together, each as soon as its own inputs are there; written `3F7|4B2`."""

    parts: tuple[Action, ...]

    def __str__(self) -> str:
        return "|".join(map(str, self.parts))


RankProgram = list[Action | Overlap]
"""What one rank does, in order."""


@attrs.frozen(eq=False)
class Program:
    """
    What every rank computes, in order, before sends and receives are put in.

    All ranks' lines stand behind one another in columns of the same length, one row for each action: its `stage`, the
    number of its `work` in WORKS, its `microbatch`, and whether it is `joined` to the action before it, with which it
    then overlaps. Rank r's line is rows `bounds[r]` to `bounds[r + 1]`. `owners` names the rank of each stage.
    """

    stage_to_rank: tuple[int, ...]
    microbatches: int
    bounds: NDArray[np.int64]
    stage: NDArray[np.int64]
    op: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    overlaps_previous: NDArray[np.bool_]

    @classmethod
    def of(cls, lines: Sequence[Iterable[Action | Overlap]], owners: Sequence[int] | None = None) -> "Program":
        """
        A program from each rank's line. Whose a stage is, is seen from whose line works on it, if it is not given.

        Raises a ValueError if an action is no work, or if it can't be told whose a stage is.
        """
        parts = [[_row(part, joined) for item in line for part, joined in _parts(item)] for line in lines]
        rows = [row for line in parts for row in line]
        stage, work, microbatch, joined = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        bounds = np.cumsum([0, *map(len, parts)])
        owners = _owners(parts) if owners is None else tuple(owners)
        return cls(owners, int(microbatch.max(initial=-1)) + 1, bounds, stage, work, microbatch, joined.astype(bool))

    @property
    def ranks(self) -> int:
        return len(self.bounds) - 1

    @property
    def stages(self) -> int:
        return len(self.stage_to_rank)

    @property
    def rank(self) -> NDArray[np.int64]:
        """Whose each action is."""
        return np.repeat(np.arange(self.ranks), np.diff(self.bounds))

    def rows(self, rank: int) -> slice:
        """Where a rank's line stands in the columns."""
        return slice(int(self.bounds[rank]), int(self.bounds[rank + 1]))

    def line(self, rank: int) -> RankProgram:
        """What one rank does, in order."""
        return joined_up(
            (self.action(row), bool(self.overlaps_previous[row])) for row in range(*self.bounds[rank : rank + 2])
        )

    def action(self, row: int) -> Action:
        """One row of the columns."""
        return Action(int(self.stage[row]), OPS[self.op[row]], int(self.microbatch[row]))

    def select(self, kept: NDArray[np.bool_]) -> "Program":
        """The same program with some of its actions only."""
        before = np.concatenate([[False], kept[:-1]])
        bounds = np.concatenate([[0], np.cumsum(kept)])[self.bounds]
        stage, work, microbatch = self.stage[kept], self.op[kept], self.microbatch[kept]
        return Program(
            self.stage_to_rank,
            self.microbatches,
            bounds,
            stage,
            work,
            microbatch,
            (self.overlaps_previous & before)[kept],
        )


def flat(line: RankProgram) -> Iterator[Action]:
    """A line's actions one by one, whether they overlap or not."""
    for item in line:
        yield from item.parts if isinstance(item, Overlap) else (item,)


def joined_up(actions: Iterable[tuple[Action, bool]]) -> RankProgram:
    """Actions, each with whether it is joined to the one before, as a line in which those that are overlap."""
    groups: list[list[Action]] = []
    for action, joined in actions:
        if joined:
            groups[-1].append(action)
        else:
            groups.append([action])
    return [group[0] if len(group) == 1 else Overlap(tuple(group)) for group in groups]


def _parts(item: Action | Overlap) -> Iterable[tuple[Action, bool]]:
    if isinstance(item, Action):
        return [(item, False)]
    return [(part, number > 0) for number, part in enumerate(item.parts)]


def _row(action: Action, joined: bool) -> tuple[int, int, int, bool]:
    if action.op not in OPS:
        raise ValueError(f"{action} is a message; a program holds work alone")
    return action.stage, OPS.index(action.op), action.microbatch, joined


def _owners(lines: Sequence[Sequence[tuple[Any, ...]]]) -> tuple[int, ...]:
    found = {(row[0], rank) for rank, line in enumerate(lines) for row in line}
    owners = dict(sorted(found))
    for stage, rank in sorted(found):
        if owners[stage] != rank:
            raise ValueError(f"ranks {rank} and {owners[stage]} both work on stage {stage}")
    if sorted(owners) != list(range(len(owners))):
        raise ValueError(f"no rank works on stage {min(set(range(len(owners))) - set(owners))}")
    return tuple(owners[stage] for stage in range(len(owners)))
