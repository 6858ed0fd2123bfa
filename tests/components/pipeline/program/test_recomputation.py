"""Recomputation of stages, in words and in bytes."""

import numpy as np
import pytest

from drawloom.components.pipeline.program.recomputation import (
    LiveMicrobatches,
    describe_recompute_policies,
    estimate_recomputed_forward_fraction,
)
from drawloom.components.ports.program import Program, iterate_actions
from support.schedules import schedule


def test_policies_are_described_by_runs_of_stages() -> None:
    """Neighbouring stages with the same policy are one run; stages without recomputation are left out."""
    assert describe_recompute_policies(("blocks", "blocks", "none", 2, "selective")) == (
        "blocks in stages 0-1, one of 2 blocks in stage 3, selective in stage 4"
    )
    assert describe_recompute_policies(("none", "none")) == describe_recompute_policies(()) == ""
    assert [estimate_recomputed_forward_fraction(policy) for policy in ("none", "blocks", 4)] == [0, 1, 0.25]


def counts(program: Program, rank: int, stages: list[int]) -> list[list[int]]:
    """Return microbatches between forward and input gradients, then until weight gradients, after every action."""
    now, counts_over_time = [0] * (2 * len(stages)), []
    for action in iterate_actions(program.rank_program(rank)):
        stage_index, waits = stages.index(action.stage), len(stages) + stages.index(action.stage)
        now[stage_index] += {"F": 1, "B": -1, "I": -1, "W": 0}[str(action.op)]
        now[waits] += {"F": 0, "B": 0, "I": 1, "W": -1}[str(action.op)]
        counts_over_time.append(list(now))
    return counts_over_time


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zero_bubble_v", "dual_pipe_v", "v_min", "zero_bubble_h2"])
def test_the_peak_of_kept_times_is_the_peak_of_all_times(name: str) -> None:
    """With any bytes per microbatch, the peak over the kept times is the peak over all actions."""
    program, random = schedule(name).program(4, 9), np.random.default_rng(0)
    for rank in range(4):
        live = LiveMicrobatches.count_at_possible_peaks(program, rank)
        every = np.array(counts(program, rank, live.stages.tolist()))
        for _ in range(20):
            sizes = random.random(2 * len(live.stages))
            kept = np.concatenate([live.kept, live.pending], axis=1)
            assert (kept @ sizes).max() == pytest.approx((every @ sizes).max())
