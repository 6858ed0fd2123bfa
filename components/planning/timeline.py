"""The memory of a pipeline rank over a step: which microbatches it holds activations of, action by action."""

from collections import Counter
from collections.abc import Mapping

import attrs

from drawloom.components.planning.stage_costs import StageCosts
from drawloom.components.ports.program import Program


@attrs.frozen
class Peak:
    """The most bytes of a rank besides what it has all the time: at which action, and by what made them."""

    bytes: int
    action: str
    kinds: Mapping[str, int]


def peak_of(program: Program, rank: int, costs: Mapping[int, StageCosts], gradients: Mapping[int, int]) -> Peak:
    """
    The peak of activations and gradients of a rank, in a step whose gradients are made by its first backward pass.

    `gradients` are their bytes by stage. Until the first backward pass of a stage ends it has none; while it goes on
    they take the place of activations, so that its peak is at its beginning or its end.
    """
    held: Counter[tuple[int, str]] = Counter()
    existing = 0
    now = 0
    has_gradients: set[int] = set()
    best, when, kinds = 0, "", dict[str, int]()
    for row in range(*program.bounds[rank : rank + 2]):
        action = program.action(row)
        part = costs[action.stage].passes[action.op]
        forward = costs[action.stage].passes["F"].held_bytes
        pending = costs[action.stage].passes["I"].held_bytes if "I" in costs[action.stage].passes else 0
        total = now + existing + part.rise
        grows = action.op in "BW" and action.stage not in has_gradients
        if grows:
            has_gradients.add(action.stage)
            existing += gradients[action.stage]
            total = max(total, now - (forward if action.op == "B" else pending) + existing)
        if total > best:
            best, when = total, str(action)
            own = part.held if action.op == "F" else {}
            kinds = _kinds(held, costs, part.rise if not grows else max(0, total - now - existing), own)
            kinds["gradients"] = existing if not grows else min(existing, max(0, total - now))
        now += {"F": forward, "B": -forward, "I": pending - forward, "W": -pending}[action.op]
        held[action.stage, "F"] += {"F": 1, "B": -1, "I": -1, "W": 0}[action.op]
        held[action.stage, "I"] += {"F": 0, "B": 0, "I": 1, "W": -1}[action.op]
    return Peak(best, when, {name: size for name, size in kinds.items() if size})


def _kinds(
    held: Counter[tuple[int, str]], costs: Mapping[int, StageCosts], rise: int, own: Mapping[str, int]
) -> dict[str, int]:
    """Bytes by what made them: those that are held, a forward's `own` that it is about to hold, and temporary ones."""
    kinds: Counter[str] = Counter(own)
    for (stage, op), count in held.items():
        for label, size in costs[stage].passes[op].held.items() if count else ():
            kinds[label] += count * size
    kinds["temporary"] += rise - sum(own.values())
    return dict(kinds)
