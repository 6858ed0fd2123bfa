"""
Choice of stages whose activations wait in host memory: on every rank those with the least copies that make room.

PipeOffload (Wan et al. 2025, arXiv 2503.01328) offloads whole stages too, and copies behind the passes in between.
Other ranks' memory does not change, so the choice is made rank by rank, as in `recomputation.py`; waits for the link
are simulated.
"""

import math
from collections import defaultdict
from collections.abc import Sequence, Set
from itertools import compress

import attrs
import numpy as np

from drawloom.components.pipeline.program.list_scheduling import ROUNDING
from drawloom.components.pipeline.program.lowering import pair_offloaded_forward_and_backward
from drawloom.components.pipeline.program.partition import FittedProgram, ModelSlices
from drawloom.components.pipeline.program.recomputation import Floats, list_stage_choices
from drawloom.components.pipeline.simulation.simulator import simulate
from drawloom.ports import Action


def offload_until_fit(
    fitted: FittedProgram, slices: ModelSlices, copies: Sequence[float], limit: float
) -> FittedProgram:
    """
    Return a program with the stages offloaded that make it fit into `limit`; its makespan is infinite if none do.

    `copies` are the times to copy the slices' activations to host memory; recomputation is left out.
    """
    merged = attrs.evolve(slices.merge_into_stages(fitted.sizes), recomputed=())
    bounds = np.cumsum([0, *fitted.sizes])
    seconds = np.add.reduceat(np.asarray(copies, dtype=np.float64), bounds[:-1])
    offloaded = set[int]()
    for rank in range(fitted.program.ranks):
        actions = [fitted.program.action(row) for row in range(*fitted.program.bounds[rank : rank + 2])]
        stages = sorted({action.stage for action in actions}, reverse=True)
        choices = [frozenset(compress(stages, chosen)) for chosen in list_stage_choices((False, True), len(stages))]
        fitting = (
            choice
            for choice in sorted(choices, key=lambda choice: float(seconds[[*choice]].sum()))
            if _compute_peak(actions, choice, merged.activations, merged.pending) <= limit * (1 + ROUNDING)
        )
        if (chosen := next(fitting, None)) is None:
            return attrs.evolve(fitted, makespan=math.inf)
        offloaded |= chosen
    program = attrs.evolve(fitted.program, recompute=(), offloaded=frozenset(offloaded))
    table = attrs.evolve(slices.compute_cost_table(fitted.sizes), offload_by_stage=seconds)
    return attrs.evolve(fitted, program=program, makespan=simulate(program, table).makespan)


def _compute_peak(actions: Sequence[Action], offloaded: Set[int], activations: Floats, pending: Floats) -> float:
    """Return a rank's peak activations on the device, by stages' activations and pending weight gradients."""
    moves: dict[int, float] = defaultdict(float)
    for start, end in pair_offloaded_forward_and_backward(actions, offloaded):
        moves[start + 2] -= activations[actions[start].stage]
        moves[end - 1] += activations[actions[start].stage]
    live, peak = 0.0, 0.0
    for number, action in enumerate(actions):
        kept, waiting = activations[action.stage], pending[action.stage]
        live += moves[number]
        change = {"F": kept, "B": -kept, "I": waiting - kept, "W": -waiting}[action.op]
        peak = max(peak, live, live + change)
        live += change
    return peak
