"""Contracts for pipeline ports: schedules, losses and executors."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from drawloom.graph.testing import BrokenContractError, expect
from drawloom.ports import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    IGNORE_INDEX,
    BufferOwner,
    Loss,
    LossSums,
    PartitioningSchedule,
    Program,
    Referenced,
    Schedule,
    TokenBatch,
    TokenContext,
    TokenLosses,
    find_loss_module,
)

# One rank and several. With fewer microbatches than ranks, schedules have only a warm-up and a cool-down.
LAYOUTS = tuple((ranks, microbatches) for ranks in (1, 2, 4) for microbatches in (1, 2, 4, 8))


def ranks_work_only_on_their_own_stages(schedule: Schedule) -> None:
    """Ranks have equally many stages, and work only on their own stages."""
    for ranks, microbatches in LAYOUTS:
        program = schedule.program(ranks, microbatches)
        expect(program.ranks == ranks, f"{ranks} ranks have a program of {program.ranks}")
        expect(
            tuple(program.stage_to_rank) == tuple(schedule.stage_to_rank(ranks)),
            "the program places stages on other ranks than stage_to_rank does",
        )
        for rank in range(ranks):
            local = [stage for stage, owner in enumerate(program.stage_to_rank) if owner == rank]
            expect(len(local) == program.stages // ranks, f"rank {rank} of {ranks} holds {len(local)} stages")
            foreign = set(program.stage[program.rows(rank)].tolist()) - set(local)
            expect(not foreign, f"rank {rank} of {ranks} works on the stages {foreign} of other ranks")


def all_stages_or_none_have_a_recompute_policy(schedule: Schedule) -> None:
    """A program has a recompute policy for every stage or for none."""
    for ranks, microbatches in LAYOUTS:
        program = schedule.program(ranks, microbatches)
        text = f"{len(program.recompute)} stages of {program.stages} have a policy of recomputation"
        expect(len(program.recompute) in (0, program.stages), text)


def every_layer_is_assigned_to_a_stage(schedule: Schedule) -> None:
    """A schedule that partitions the layers assigns all the model's layers, and at least one per stage."""
    if not isinstance(schedule, PartitioningSchedule):
        return
    for ranks, _ in LAYOUTS:
        sizes = [*schedule.layers_by_stage(ranks, 16)]
        expect(len(sizes) == len(schedule.stage_to_rank(ranks)), f"{ranks} ranks have stages, and {len(sizes)} sizes")
        expect(min(sizes) > 0 and sum(sizes) == 16, f"16 layers on {ranks} ranks are cut into {sizes}")


def every_stage_runs_one_forward_and_backward_per_microbatch(schedule: Schedule) -> None:
    """A stage runs one forward and one backward per microbatch; the backward is whole or in two parts."""
    for ranks, microbatches in LAYOUTS:
        program = schedule.program(ranks, microbatches)
        pairs = {(stage, number) for stage in range(program.stages) for number in range(microbatches)}
        where = f"with {ranks} ranks and {microbatches} microbatches"
        expect(
            _stages_and_microbatches_of(program, FORWARD) == sorted(pairs),
            f"{where} some forward is missing, or there twice",
        )
        whole, inputs, weights = (
            _stages_and_microbatches_of(program, op) for op in (BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
        )
        expect(inputs == weights, f"{where} some backward has one part without the other")
        backward = sorted(whole + inputs)
        expect(backward == sorted(pairs), f"{where} some backward is missing, or there twice")


def a_second_call_returns_the_same_program(one: Schedule, other: Schedule) -> None:
    """A second call, and a second schedule with the same settings, return the same program."""
    for ranks, microbatches in LAYOUTS:
        programs = [schedule.program(ranks, microbatches) for schedule in (one, one, other)]
        is_same = all(
            np.array_equal(programs[0].op, p.op) and np.array_equal(programs[0].stage, p.stage) for p in programs
        )
        expect(is_same, f"the program of {ranks} ranks and {microbatches} microbatches differs between calls")


def _stages_and_microbatches_of(program: Program, op: int) -> list[tuple[int, int]]:
    """Return the sorted pairs (stage, microbatch) of an op's actions."""
    selected = program.op == op
    return sorted(zip(program.stage[selected].tolist(), program.microbatch[selected].tolist(), strict=True))


VOCAB = 11
"""Vocabulary size in the contracts of losses."""


class _Head:
    """A head in plain torch and float64."""

    def __init__(self, width: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.randn(VOCAB, width, generator=generator, dtype=torch.float64, requires_grad=True)

    def token_losses(self, hidden: Tensor, targets: Tensor, weights: Tensor | None = None) -> TokenLosses:
        logits = self.logits(hidden)
        losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
        losses = losses.view(targets.shape)
        return TokenLosses(losses if weights is None else losses * weights, logits.logsumexp(-1))

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight.T

    def mean_logits(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden).mean(-1)

    def map_logits(
        self, function: Callable[..., Tensor], hidden: Tensor, *tensors: Tensor, max_bytes: int = 0
    ) -> Tensor:
        parts = (tensor.flatten(0, 1) for tensor in tensors)
        return function(self.logits(hidden).flatten(0, 1), *parts).view(hidden.shape[:-1])


def _make_token_batch() -> TokenBatch:
    """Return 4 rows with 6 tokens and different weights, some without a target."""
    tokens = torch.arange(24).reshape(4, 6) % VOCAB
    targets = (tokens + 1) % VOCAB
    targets[:, 5] = IGNORE_INDEX
    weights = (torch.arange(1.0, 25).reshape(4, 6) / 7).masked_fill(targets == IGNORE_INDEX, 0)
    return TokenBatch(tokens, targets, torch.arange(6).repeat(4, 1), torch.zeros_like(tokens), weights)


def _make_inputs(loss: Loss) -> tuple[Tensor, _Head, TokenBatch]:
    """
    Return hidden states, a head and rows, and give the loss's module, if it has one, initial values in float64.


    The hidden states are as wide as a module needs.
    """
    if others := set(loss.batch_leaves) - TokenBatch.specs.keys():
        names = ", ".join(sorted(others))
        raise BrokenContractError(
            f"the loss needs {names}, and batches in this contract have only tokens; test the loss in a run"
        )
    width = 8
    if (module := find_loss_module(loss)) is not None:
        module.to_empty(device="cpu").double()
        torch.manual_seed(3)
        for owner in module.modules():
            if isinstance(owner, BufferOwner):
                owner.reset_parameters()
        width = next(module.parameters()).shape[-1]
    batch = _make_token_batch()
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(*batch.tokens.shape, width, generator=generator, dtype=torch.float64).requires_grad_()
    return hidden, _Head(width), batch


def _compute_loss(loss: Loss, hidden: Tensor, head: _Head, batch: TokenBatch) -> LossSums:
    """Compute a loss; it gets inner hidden states and a reference model's log probabilities from other ones."""
    if isinstance(loss, Referenced):
        with torch.no_grad():
            batch = loss.with_reference(batch, loss.reference_values(hidden.flip(2), head, batch))
    inner = loss.inputs(batch)[1].hidden_states
    given: Any = hidden if inner is None else (hidden, dict.fromkeys(inner.layers, hidden.flip(2)))
    return loss.loss(given, head, batch)


def _name_all_sums(result: LossSums) -> dict[str, Tensor]:
    total, weight, sums = result
    return {"the loss": total.detach(), "the weight": weight, **sums}


def loss_is_differentiable_and_weight_is_a_sum(loss: Loss) -> None:
    """Loss and weight are scalars, the loss is differentiable, and the weight is the sum of the batch's weights."""
    hidden, head, batch = _make_inputs(loss)
    total, weight, _ = _compute_loss(loss, hidden, head, batch)
    for name, tensor in (("the loss", total), ("the weight", weight)):
        expect(tensor.ndim == 0, f"{name} is not a single number but a tensor of shape {tuple(tensor.shape)}")
    expect(total.requires_grad, "the loss can't be differentiated")
    grads = torch.autograd.grad(total, (hidden, head.weight), allow_unused=True)
    expect(grads[0] is not None and bool(grads[0].any()), "the loss does not depend on the hidden states")
    expect(grads[0] is not None and bool(grads[0].isfinite().all()), "a gradient is not finite")
    expect(torch.allclose(weight.double(), batch.weights.double().sum()), f"the weight is {weight.item()}")


def sums_over_microbatches_add_up_to_the_batch(loss: Loss) -> None:
    """Sums over microbatches add up to the sums over the whole batch."""
    hidden, head, batch = _make_inputs(loss)
    whole = _name_all_sums(_compute_loss(loss, hidden, head, batch))
    parts = [
        _name_all_sums(_compute_loss(loss, hidden[rows], head, batch.take_rows(rows)))
        for rows in (slice(0, 1), slice(1, 4))
    ]
    for name, value in whole.items():
        expect(all(name in part for part in parts), f"{name} is not in every microbatch")
        total = parts[0][name].double() + parts[1][name].double()
        expect(torch.allclose(value.double(), total), f"of parts, {name} is {total.tolist()}, of all {value.tolist()}")


def sums_are_proportional_to_weights(loss: Loss) -> None:
    """Doubling the weights doubles all sums, and tokens with weight 0 add nothing."""
    hidden, head, batch = _make_inputs(loss)
    single = _name_all_sums(_compute_loss(loss, hidden, head, batch))
    double = _name_all_sums(_compute_loss(loss, hidden, head, batch.evolve(weights=2 * batch.weights)))
    for name, value in single.items():
        expect(
            torch.allclose(2 * value.double(), double[name].double()), f"with twice the weights {name} is not doubled"
        )
    # A mean over no tokens would be 0 / 0, so this also finds NaN.
    weightless = batch.evolve(weights=torch.zeros_like(batch.weights))
    for name, value in _name_all_sums(_compute_loss(loss, hidden, head, weightless)).items():
        expect(not bool(value.any()), f"where no token counts, {name} is {value.tolist()}")


def model_inputs_have_all_tokens_positions_and_documents(loss: Loss) -> None:
    """The first stage gets all rows and tokens in the batch, and all stages get their positions and documents."""
    tokens, shared = loss.inputs(_make_inputs(loss)[2])
    if not isinstance(shared, TokenContext):
        raise BrokenContractError("the loss passes no positions and documents to the model")
    shapes = [tokens.shape, shared.positions.shape, shared.document_ids.shape]
    expect(shapes == [(4, 6)] * 3, f"the model sees shapes {shapes}")
