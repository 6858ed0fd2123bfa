"""Contracts of the ports of pipelines: schedules and losses."""

import numpy as np
import torch

from drawloom.components.ports.data import IGNORE_INDEX, Batch
from drawloom.components.ports.pipeline import Loss, Schedule
from drawloom.components.ports.program import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Program
from drawloom.graph.testing import expect

LAYOUTS = tuple((ranks, microbatches) for ranks in (1, 2, 4) for microbatches in (1, 2, 4, 8))


def every_rank_has_its_stages(schedule: Schedule) -> None:
    """Each rank holds as many stages as is said, and works on no others."""
    for ranks, microbatches in LAYOUTS:
        program = schedule.program(ranks, microbatches)
        expect(program.ranks == ranks, f"{ranks} ranks have a program of {program.ranks}")
        expect(
            tuple(program.stage_to_rank) == tuple(schedule.stage_to_rank(ranks)),
            "the program has other owners of stages",
        )
        for rank in range(ranks):
            held = [stage for stage, owner in enumerate(program.stage_to_rank) if owner == rank]
            expect(len(held) == schedule.stages_per_rank, f"rank {rank} of {ranks} holds {len(held)} stages")
            strange = set(program.stage[program.rows(rank)].tolist()) - set(held)
            expect(not strange, f"rank {rank} of {ranks} works on the stages {strange} of others")


def every_microbatch_goes_through_every_stage_once(schedule: Schedule) -> None:
    """One forward each; and one backward, whole or in its two parts, for all of them or for none."""
    for ranks, microbatches in LAYOUTS:
        program = schedule.program(ranks, microbatches)
        wanted = {(stage, number) for stage in range(program.stages) for number in range(microbatches)}
        where = f"with {ranks} ranks and {microbatches} microbatches"
        expect(_done(program, FORWARD) == sorted(wanted), f"{where} some forward is missing, or done twice")
        whole, inputs, weights = (_done(program, work) for work in (BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT))
        expect(inputs == weights, f"{where} some backward has one part only")
        backward = sorted(whole + inputs)
        expect(backward in ([], sorted(wanted)), f"{where} some backward is missing, or done twice")


def it_is_a_pure_function(one: Schedule, other: Schedule) -> None:
    """Asked again, and asked of another that is made alike, it gives the same program."""
    for ranks, microbatches in LAYOUTS:
        programs = [schedule.program(ranks, microbatches) for schedule in (one, one, other)]
        same = all(
            np.array_equal(programs[0].op, p.op) and np.array_equal(programs[0].stage, p.stage) for p in programs
        )
        expect(same, f"the program of {ranks} ranks and {microbatches} microbatches changes")


def _done(program: Program, work: int) -> list[tuple[int, int]]:
    chosen = program.op == work
    return sorted(zip(program.stage[chosen].tolist(), program.microbatch[chosen].tolist(), strict=True))


def _batch(ignored: bool = False) -> Batch:
    tokens = torch.arange(12).reshape(2, 6)
    targets = torch.full_like(tokens, IGNORE_INDEX) if ignored else tokens + 1
    return Batch(tokens, targets, torch.arange(6).expand(2, 6).clone(), torch.zeros(2, 6, dtype=torch.int64))


def losses_are_summed(objective: Loss) -> None:
    """The loss is the sum of the losses by token, whose weights are summed beside it; both are single numbers."""
    losses = torch.ones(2, 6, requires_grad=True)
    total, weight = objective.loss(losses, _batch())
    expect(total.ndim == weight.ndim == 0, "a sum is no single number")
    expect(total.requires_grad, "the loss can't be differentiated")
    expect(
        torch.allclose(total.double(), weight.double()), f"losses of 1 make {total.item()} of weight {weight.item()}"
    )


def what_is_ignored_weighs_nothing(objective: Loss) -> None:
    """A batch in which nothing is to be learned has the weight 0."""
    _, weight = objective.loss(torch.zeros(2, 6), _batch(ignored=True))
    expect(float(weight) == 0, f"nothing weighs {float(weight)}")


def the_model_sees_tokens(objective: Loss) -> None:
    """The first stage takes as many rows and tokens as the batch has, and all stages see their places."""
    tokens, shared = objective.inputs(_batch())
    expect(
        tokens.shape == shared.positions.shape == shared.document_ids.shape == (2, 6), "the model sees another shape"
    )
