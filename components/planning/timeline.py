"""A pipeline rank's memory over a step: the live activations, action by action."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import accumulate

import attrs

from drawloom.components.pipeline.program.lowering import pair_offloaded_forward_and_backward
from drawloom.components.planning.stage_costs import StageCosts
from drawloom.ports import Program


@attrs.frozen
class Peak:
    """A rank's peak beyond its persistent bytes: the action at the peak, and the bytes by label."""

    bytes: int
    action: str
    kinds: Mapping[str, int]


def compute_peak_memory(
    program: Program,
    rank: int,
    costs: Mapping[int, StageCosts],
    gradients: Mapping[int, int],
    kept: Mapping[int, int] = {},
) -> Peak:
    """
    Return a rank's peak for activations and gradients if the step's first backward pass allocates gradients.

    `gradients` are bytes by stage, and `kept` those that no update frees. A stage's first backward pass allocates its
    other gradients while it frees activations, so the stage's peak is at the pass's beginning, in its last block, or at
    its end. Offloaded stages' activations wait in host memory.
    """
    actions = [program.action(row) for row in range(*program.bounds[rank : rank + 2])]
    moves: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for start, end in pair_offloaded_forward_and_backward(actions, program.offloaded):
        # Their memory is free from the second action after the forward pass to the last before the backward pass.
        moves[start + 2].append((actions[start].stage, -1))
        moves[end - 1].append((actions[start].stage, 1))
    live: Counter[tuple[int, str]] = Counter()
    gradient_bytes = sum(kept.values())
    activations = 0
    has_gradients: set[int] = set()
    peak, peak_action, kinds = 0, "", dict[str, int]()
    for number, action in enumerate(actions):
        for stage, change in moves[number]:
            activations += change * costs[stage].passes["F"].total_kept_bytes
            live[stage, "F"] += change
        cost = costs[action.stage].passes[action.op]
        forward = costs[action.stage].passes["F"].total_kept_bytes
        pending = costs[action.stage].passes["I"].total_kept_bytes if "I" in costs[action.stage].passes else 0
        total = activations + gradient_bytes + cost.peak_delta
        allocates_gradients = action.op in "BW" and action.stage not in has_gradients
        if allocates_gradients:
            has_gradients.add(action.stage)
            gradient_bytes += gradients[action.stage] - kept.get(action.stage, 0)
            late = max(cost.last_delta, -forward) if action.op == "B" else -pending
            total = max(total, activations + late + gradient_bytes)
        if total > peak:
            peak, peak_action = total, str(action)
            own = cost.kept_bytes if action.op == "F" else {}
            delta, shown = cost.peak_delta, gradient_bytes
            if allocates_gradients:
                delta = max(0, total - activations - gradient_bytes)
                shown = min(gradient_bytes, max(0, total - activations))
            kinds = _sum_activation_bytes_by_label(live, costs, delta, own) | {"gradients": shown}
        activations += {"F": forward, "B": -forward, "I": pending - forward, "W": -pending}[action.op]
        live[action.stage, "F"] += {"F": 1, "B": -1, "I": -1, "W": 0}[action.op]
        live[action.stage, "I"] += {"F": 0, "B": 0, "I": 1, "W": -1}[action.op]
    return Peak(peak, peak_action, {name: size for name, size in kinds.items() if size})


def compute_peak_host_bytes(program: Program, rank: int, costs: Mapping[int, StageCosts]) -> int:
    """Return a rank's peak activation bytes in host memory, from OFFLOAD until the backward pass."""
    actions = [program.action(row) for row in range(*program.bounds[rank : rank + 2])]
    changes: Counter[int] = Counter()
    for start, end in pair_offloaded_forward_and_backward(actions, program.offloaded):
        size = costs[actions[start].stage].passes["F"].total_kept_bytes
        changes[start] += size
        changes[end] -= size
    return max(accumulate((changes[index] for index in range(len(actions))), initial=0))


def _sum_activation_bytes_by_label(
    live: Counter[tuple[int, str]], costs: Mapping[int, StageCosts], peak_delta: int, new_activations: Mapping[str, int]
) -> dict[str, int]:
    """Sum bytes by label: live activations, a forward pass's new ones, and temporary tensors."""
    kinds: Counter[str] = Counter(new_activations)
    for (stage, op), count in live.items():
        for label, size in costs[stage].passes[op].kept_bytes.items() if count else ():
            kinds[label] += count * size
    kinds["temporary"] += peak_delta - sum(new_activations.values())
    return dict(kinds)
