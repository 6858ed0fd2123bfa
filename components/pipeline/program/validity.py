"""What is wrong with a program, in sentences: what must hold of any, whoever made it."""

from collections.abc import Iterator
from itertools import product

from drawloom.components.pipeline.program.costs import Costs
from drawloom.components.pipeline.program.timing import Deadlock, time
from drawloom.components.ports.program import Program, flat

TRAINS = ("FB", "FIW")
INFERS = ("F",)


def faults(program: Program) -> list[str]:
    """
    All that is wrong, the empty list if nothing is.

    Each stage goes forward once for each microbatch, then backward once, at once or towards inputs and then weights,
    on the rank that owns it; or the whole program goes forward only. And it comes to an end.
    """
    return [*_on_other_ranks(program), *_not_once(program)] or _stuck(program)


def _on_other_ranks(program: Program) -> Iterator[str]:
    for rank in range(program.ranks):
        for action in flat(program.line(rank)):
            if not 0 <= action.stage < program.stages:
                yield f"{action} on rank {rank}: there are stages 0 to {program.stages - 1}"
            elif program.stage_to_rank[action.stage] != rank:
                yield f"{action} is on rank {rank}, but its stage belongs to rank {program.stage_to_rank[action.stage]}"


def _not_once(program: Program) -> Iterator[str]:
    done = dict.fromkeys(product(range(program.stages), range(program.microbatches)), "")
    for rank in range(program.ranks):
        for action in flat(program.line(rank)):
            place = action.stage, action.microbatch
            done[place] = done.get(place, "") + action.op
    fine = TRAINS if any(works.strip("F") for works in done.values()) else INFERS
    for (stage, microbatch), works in done.items():
        if works not in fine:
            yield f"stage {stage} does {works or 'nothing'} for microbatch {microbatch}, not {' or '.join(fine)}"


def _stuck(program: Program) -> list[str]:
    try:
        time(program, Costs())
    except Deadlock as stuck:
        return [str(stuck)]
    return []
