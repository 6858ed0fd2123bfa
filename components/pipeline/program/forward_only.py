"""The program that only goes forward, for stages that stand anywhere: evaluation, and models at work."""

from collections.abc import Sequence

from drawloom.components.ports.program import Action, Program


def forward_only(owners: Sequence[int], microbatches: int) -> Program:
    """
    Microbatches follow one another through the stages, each a stage behind the one before.

    Where a rank holds several stages that are due at once, the one nearest to the end comes first, so that what is
    under way gets done.
    """
    places = [(stage, number) for stage in range(len(owners)) for number in range(microbatches)]
    places.sort(key=lambda place: (place[0] + place[1], -place[0]))
    lines: list[list[Action]] = [[] for _ in range(max(owners) + 1)]
    for stage, number in places:
        lines[owners[stage]].append(Action(stage, "F", number))
    return Program.of(lines, owners)
