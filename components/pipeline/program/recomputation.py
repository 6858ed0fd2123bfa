"""
Choice of recomputation (activation checkpointing) by stage: the least with enough memory on every rank.

Recomputation on a rank does not change other ranks' memory, so the choice is made rank by rank: among all choices
within its memory, the one with the shortest backward passes. Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models", MLSys 2023, choose by layer in the same way, equally on every rank.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby, product
from typing import Literal, NamedTuple, TypeVar

import attrs
import numpy as np
from numpy.typing import NDArray

from drawloom.ports import BACKWARD_INPUT, FORWARD, Program, Recompute

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Option = TypeVar("Option")

SELECTIVE = 0.06
"""Approximate part of a forward pass that "selective" repeats: Qwen3-0.6B keeps 98 % of its speed."""

ONE_OF = (1, 2, 3, 4, 6, 8)
"""Numbers n of which every n-th block may be recomputed."""

MAX_INDEPENDENT_STAGES = 2
"""A rank with more stages has one option, such as a recompute policy, for all of them."""


def estimate_recomputed_forward_fraction(policy: Recompute) -> float:
    """Return approximately the fraction repeated in the backward pass, from 0 to 1, for a stage's forward pass."""
    if isinstance(policy, int):
        return 1 / policy
    return {"none": 0.0, "selective": SELECTIVE, "quantized": SELECTIVE, "blocks": 1.0}[policy]


def describe_recompute_policies(policies: Sequence[Recompute]) -> str:
    """Return policies as text, such as `blocks in stages 0-3, selective in stage 4`; empty without recomputation."""
    runs: list[str] = []
    for policy, group in groupby(range(len(policies)), lambda stage: policies[stage]):
        stages = list(group)
        where = f"stages {stages[0]}-{stages[-1]}" if len(stages) > 1 else f"stage {stages[0]}"
        name = f"one of {policy} blocks" if isinstance(policy, int) else policy
        runs += [] if policy == "none" else [f"{name} in {where}"]
    return ", ".join(runs)


@attrs.frozen(eq=False)
class RecomputeCosts:
    """
    Recompute policy costs by model slice.

    `again` (slices,) is the time by which backward passes take longer, and `kept` (slices,) the part of a microbatch's
    activations kept from the forward until the backward pass.
    """

    policy: Literal["selective", "blocks"]
    again: Floats
    kept: Floats


class ChosenOptions(NamedTuple):
    """Recompute options as indices (partitions, stages), and whether a partition fits (partitions,)."""

    options: Ints
    fits: NDArray[np.bool_]


@attrs.frozen(eq=False)
class RecomputeOptions:
    """
    Recompute policies for several partitions' stages; the first option recomputes nothing.

    `again` (options, partitions, stages) is the time by which backward passes take longer, and `kept`, with the same
    shape, the activations alive from forward passes until input gradients. `pending` (partitions, stages) stays alive
    from input gradients until weight gradients.
    """

    policies: tuple[Recompute, ...]
    again: Floats
    kept: Floats
    pending: Floats

    def choose_least_recomputation(self, ranks: Sequence["LiveMicrobatches"], limit: float) -> ChosenOptions:
        """Choose the options with the least repeated time within `limit` on every rank; 0 if no options fit."""
        chosen, fits = np.zeros(self.pending.shape, dtype=np.int64), np.ones(len(self.pending), dtype=bool)
        for rank in ranks:
            nothing, partitions = np.zeros((1, len(rank.stages)), dtype=np.int64), np.arange(len(self.pending))
            over = np.flatnonzero(self._compute_peaks(rank, nothing, partitions)[0] > limit)
            if len(over) and len(self.policies) > 1:
                tried: Ints = np.array(list_stage_choices(range(len(self.policies)), len(rank.stages)))
                more = self.again[tried[..., None], over, rank.stages[:, None]].sum(1)
                more[self._compute_peaks(rank, tried, over) > limit] = np.inf
                best = more.argmin(0)
                chosen[over[:, None], rank.stages] = tried[best]
                over = over[more[best, np.arange(len(over))] == np.inf]
            fits[over] = False
        chosen[~fits] = 0
        return ChosenOptions(chosen, fits)

    def _compute_peaks(self, rank: "LiveMicrobatches", tried: Ints, partitions: Ints) -> Floats:
        """Compute a rank's peak activations (ways, partitions) for recompute choices `tried` (ways, stages)."""
        kept = self.kept[tried[..., None], partitions, rank.stages[:, None]]
        waiting = rank.pending @ self.pending[partitions[:, None], rank.stages].T
        peaks: Floats = (np.einsum("ts,wsp->twp", rank.kept, kept) + waiting[:, None]).max(0)
        return peaks


def list_stage_choices(options: Iterable[Option], stages: int) -> list[tuple[Option, ...]]:
    """Return a rank's choices of an option by stage, the first option for all stages first."""
    if stages > MAX_INDEPENDENT_STAGES:
        return [(option,) * stages for option in options]
    return list(product(options, repeat=stages))


@attrs.frozen(eq=False)
class LiveMicrobatches:
    """
    Numbers of live microbatches on a rank when its memory may peak, with shape (peaks, stages).

    Activations are `kept` from forward passes until input gradients, and `pending` until weight gradients.
    """

    stages: Ints
    kept: Ints
    pending: Ints

    @classmethod
    def count_at_possible_peaks(cls, program: Program, rank: int) -> "LiveMicrobatches":
        """Count a rank's live microbatches at all times where its memory may peak, whatever the sizes."""
        rows = program.rows(rank)
        stages = np.unique(program.stage[rows])
        op, own = program.op[rows], program.stage[rows, None] == stages
        kept = np.array([1, -1, -1, 0])[op]
        pending = np.array([0, 0, 1, -1])[op]
        counts = np.concatenate([own * kept[:, None], own * pending[:, None]], axis=1).cumsum(0)
        # Memory grows only after F and I; a time followed by F is exceeded by the next.
        counts = np.unique(
            counts[((op == FORWARD) | (op == BACKWARD_INPUT)) & (np.append(op[1:], -1) != FORWARD)], axis=0
        )
        most = counts[(counts[:, None] <= counts).all(2).sum(1) == 1]
        return cls(stages, most[:, : len(stages)], most[:, len(stages) :])
