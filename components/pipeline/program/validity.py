"""Validation for programs: violated schedule rules, as sentences."""

from collections.abc import Iterator
from itertools import product

from drawloom.components.pipeline.program.timing import Costs, DeadlockError, compute_timing
from drawloom.ports import Program, iterate_actions

TRAINS = ("FB", "FIW")
INFERS = ("F",)


def find_violations(program: Program) -> list[str]:
    """
    Return a program's violations, or an empty list if it is valid.

    For every microbatch, a stage runs one forward pass and then one backward pass, whole or split into I and W, on the
    stage's rank; or the whole program consists of forward passes. The program must not deadlock.
    """
    return [*_find_wrong_ranks(program), *_find_missing_or_repeated_passes(program)] or _find_deadlocks(program)


def _find_wrong_ranks(program: Program) -> Iterator[str]:
    """Yield a sentence for every action outside the stages, or on another rank than its stage."""
    for rank in range(program.ranks):
        for action in iterate_actions(program.rank_program(rank)):
            if not 0 <= action.stage < program.stages:
                yield f"{action} on rank {rank}: there are stages 0 to {program.stages - 1}"
            elif program.stage_to_rank[action.stage] != rank:
                yield f"{action} is on rank {rank}, but its stage belongs to rank {program.stage_to_rank[action.stage]}"


def _find_missing_or_repeated_passes(program: Program) -> Iterator[str]:
    """Yield a sentence for every stage and microbatch without exactly its passes, in order."""
    done = dict.fromkeys(product(range(program.stages), range(program.microbatches)), "")
    for rank in range(program.ranks):
        for action in iterate_actions(program.rank_program(rank)):
            key = action.stage, action.microbatch
            done[key] = done.get(key, "") + action.op
    allowed = TRAINS if any(ops.strip("F") for ops in done.values()) else INFERS
    for (stage, microbatch), ops in done.items():
        if ops not in allowed:
            yield f"stage {stage} does {ops or 'nothing'} for microbatch {microbatch}, not {' or '.join(allowed)}"


def _find_deadlocks(program: Program) -> list[str]:
    try:
        compute_timing(program, Costs())
    except DeadlockError as deadlock:
        return [str(deadlock)]
    return []
