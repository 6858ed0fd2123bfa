"""
What the stages of a partition may compute again, and the least of it with which every rank has enough memory.

Which stages of a rank recompute does not change what other ranks hold. So the choice is made rank by rank: of all that
fit in its memory, the one whose backward passes take the least time longer. Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", MLSys 2023, choose by layer in the same way, alike on every rank.
"""

from collections.abc import Sequence
from itertools import groupby, product
from typing import Literal

import attrs
import numpy as np
from numpy.typing import NDArray

from drawloom.components.ports.program import BACKWARD_INPUT, FORWARD, Program
from drawloom.components.ports.stages import Recompute

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SELECTIVE = 0.06
"""
What part of a forward "selective" repeats, about: Qwen3-0.6B keeps 98 % of its speed with it (docs/benchmarks.md).
"""

ONE_OF = (1, 2, 3, 4, 6, 8)
"""Of how many blocks one may be recomputed."""

MOST_STAGES = 2
"""A rank of more stages recomputes the same in all."""


def repeated(policy: Recompute) -> float:
    """What part of a stage's forward its backward passes compute again, about."""
    if isinstance(policy, int):
        return 1 / policy
    return {"none": 0.0, "selective": SELECTIVE, "blocks": 1.0}[policy]


def text_of(policies: Sequence[Recompute]) -> str:
    """The policies of stages, as `blocks in stages 0-3, selective in stage 4`; empty where nothing is recomputed."""
    runs: list[str] = []
    for policy, group in groupby(range(len(policies)), lambda stage: policies[stage]):
        stages = list(group)
        where = f"stages {stages[0]}-{stages[-1]}" if len(stages) > 1 else f"stage {stages[0]}"
        what = f"one of {policy} blocks" if isinstance(policy, int) else policy
        runs += [] if policy == "none" else [f"{what} in {where}"]
    return ", ".join(runs)


@attrs.frozen(eq=False)
class Recomputed:
    """
    What a policy costs in each slice of a model, `again` (slices,), by which its backward pass takes longer, and what
    it leaves of a microbatch's activations from the forward until the backward pass, `kept` (slices,).
    """

    policy: Literal["selective", "blocks"]
    again: Floats
    kept: Floats


@attrs.frozen(eq=False)
class Options:
    """
    What the stages of some partitions may recompute, the first of them nothing.

    By option, partition and stage, `again` is the time by which backward passes take longer, and `kept` what is held
    from forwards until input gradients; by partition and stage, `pending` is held from these until weight gradients.
    """

    policies: tuple[Recompute, ...]
    again: Floats
    kept: Floats
    pending: Floats

    def least(self, held: Sequence["Held"], limit: float) -> tuple[Ints, NDArray[np.bool_]]:
        """
        The options (partitions, stages) that take least time and fit in the memory of each rank.

        They are 0 where there is none; whether there is one follows, by partition.
        """
        chosen, fits = np.zeros(self.pending.shape, dtype=np.int64), np.ones(len(self.pending), dtype=bool)
        for each in held:
            nothing, every = np.zeros((1, len(each.stages)), dtype=np.int64), np.arange(len(self.pending))
            over = np.flatnonzero(self._peaks(each, nothing, every)[0] > limit)
            if len(over) and len(self.policies) > 1:
                tried = ways(len(self.policies), len(each.stages))
                more = self.again[tried[..., None], over, each.stages[:, None]].sum(1)
                more[self._peaks(each, tried, over) > limit] = np.inf
                best = more.argmin(0)
                chosen[over[:, None], each.stages] = tried[best]
                over = over[more[best, np.arange(len(over))] == np.inf]
            fits[over] = False
        chosen[~fits] = 0
        return chosen, fits

    def _peaks(self, held: "Held", tried: Ints, partitions: Ints) -> Floats:
        """The most (ways, partitions) that a rank holds, of some partitions, in some ways to recompute."""
        kept = self.kept[tried[..., None], partitions, held.stages[:, None]]
        waiting = held.pending @ self.pending[partitions[:, None], held.stages].T
        found: Floats = (np.einsum("ts,wsp->twp", held.kept, kept) + waiting[:, None]).max(0)
        return found


def ways(options: int, stages: int) -> Ints:
    """Every way (ways, stages) in which the stages of a rank may recompute, the first of them nothing."""
    if stages > MOST_STAGES:
        return np.repeat(np.arange(options)[:, None], stages, axis=1)
    return np.array(list(product(range(options), repeat=stages)))


@attrs.frozen(eq=False)
class Held:
    """
    Of how many microbatches a rank holds activations of each of its stages (times, stages), at various times.

    They are `kept` from forwards until input gradients, and `pending` until weight gradients.
    """

    stages: Ints
    kept: Ints
    pending: Ints

    @classmethod
    def of(cls, program: Program, rank: int) -> "Held":
        """What a rank holds at times of which no other has more of everything."""
        rows = program.rows(rank)
        stages = np.unique(program.stage[rows])
        op, own = program.op[rows], program.stage[rows, None] == stages
        kept = np.array([1, -1, -1, 0])[op]
        pending = np.array([0, 0, 1, -1])[op]
        counts = np.concatenate([own * kept[:, None], own * pending[:, None]], axis=1).cumsum(0)
        # It holds more only after F and I, and less of nothing only after F.
        counts = np.unique(
            counts[((op == FORWARD) | (op == BACKWARD_INPUT)) & (np.append(op[1:], -1) != FORWARD)], axis=0
        )
        most = counts[(counts[:, None] <= counts).all(2).sum(1) == 1]
        return cls(stages, most[:, : len(stages)], most[:, len(stages) :])
