"""Contracts of the ports of pipelines: schedules, losses and executors."""

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from drawloom.components.ports.data import IGNORE_INDEX, Batch
from drawloom.components.ports.model import BatchContext, BufferOwner
from drawloom.components.ports.pipeline import (
    Executor,
    Loss,
    PartitioningSchedule,
    Predictor,
    Referenced,
    Schedule,
    module_of,
    state_of_batches,
    sum_losses,
)
from drawloom.components.ports.program import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Program
from drawloom.graph.testing import expect

# One rank and several, and fewer microbatches than ranks, where schedules have only warm-up and cool-down.
LAYOUTS = tuple((ranks, microbatches) for ranks in (1, 2, 4) for microbatches in (1, 2, 4, 8))


def every_rank_has_its_stages(schedule: Schedule) -> None:
    """Each rank holds as many stages as any other, and works on no others."""
    for ranks, microbatches in LAYOUTS:
        program = schedule.program(ranks, microbatches)
        expect(program.ranks == ranks, f"{ranks} ranks have a program of {program.ranks}")
        expect(
            tuple(program.stage_to_rank) == tuple(schedule.stage_to_rank(ranks)),
            "the program places stages on other ranks than stage_to_rank does",
        )
        for rank in range(ranks):
            held = [stage for stage, owner in enumerate(program.stage_to_rank) if owner == rank]
            expect(len(held) == program.stages // ranks, f"rank {rank} of {ranks} holds {len(held)} stages")
            strange = set(program.stage[program.rows(rank)].tolist()) - set(held)
            expect(not strange, f"rank {rank} of {ranks} works on the stages {strange} of other ranks")


def every_stage_recomputes_by_a_policy_or_none_does(schedule: Schedule) -> None:
    """A program that says what is recomputed says it of each stage."""
    for ranks, microbatches in LAYOUTS:
        program = schedule.program(ranks, microbatches)
        having = f"{len(program.recompute)} stages of {program.stages} have a policy of recomputation"
        expect(len(program.recompute) in (0, program.stages), having)


def layers_are_those_of_the_model(schedule: Schedule) -> None:
    """A schedule that says how many layers each stage has gives each stage some, and all layers of the model."""
    if not isinstance(schedule, PartitioningSchedule):
        return
    for ranks, _ in LAYOUTS:
        sizes = [*schedule.layers_by_stage(ranks, 16)]
        expect(len(sizes) == len(schedule.stage_to_rank(ranks)), f"{ranks} ranks have stages, and {len(sizes)} sizes")
        expect(min(sizes) > 0 and sum(sizes) == 16, f"16 layers on {ranks} ranks are cut into {sizes}")


def every_microbatch_goes_through_every_stage_once(schedule: Schedule) -> None:
    """Each pair has one forward, and one backward, whole or in two parts."""
    for ranks, microbatches in LAYOUTS:
        program = schedule.program(ranks, microbatches)
        wanted = {(stage, number) for stage in range(program.stages) for number in range(microbatches)}
        where = f"with {ranks} ranks and {microbatches} microbatches"
        expect(_done(program, FORWARD) == sorted(wanted), f"{where} some forward is missing, or there twice")
        whole, inputs, weights = (_done(program, work) for work in (BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT))
        expect(inputs == weights, f"{where} some backward has one part without the other")
        backward = sorted(whole + inputs)
        expect(backward == sorted(wanted), f"{where} some backward is missing, or there twice")


def it_is_a_pure_function(one: Schedule, other: Schedule) -> None:
    """A second call, and a second schedule with the same settings, give the same program."""
    for ranks, microbatches in LAYOUTS:
        programs = [schedule.program(ranks, microbatches) for schedule in (one, one, other)]
        same = all(
            np.array_equal(programs[0].op, p.op) and np.array_equal(programs[0].stage, p.stage) for p in programs
        )
        expect(same, f"the program of {ranks} ranks and {microbatches} microbatches differs between calls")


def _done(program: Program, work: int) -> list[tuple[int, int]]:
    chosen = program.op == work
    return sorted(zip(program.stage[chosen].tolist(), program.microbatch[chosen].tolist(), strict=True))


WIDTH, VOCAB = 8, 11
"""Channels of the hidden states, and words of the vocabulary, that a loss is tried with."""


class _Head:
    """A head in plain torch, in float64."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)

    def token_losses(self, hidden: Tensor, targets: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        logits = self.logits(hidden)
        losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
        losses = losses.view(targets.shape)
        return losses if weights is None else losses * weights, logits.logsumexp(-1)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight.T

    def mean_logits(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden).mean(-1)

    def map_logits(
        self, function: Callable[..., Tensor], hidden: Tensor, *tensors: Tensor, max_bytes: int = 0
    ) -> Tensor:
        parts = (tensor.flatten(0, 1) for tensor in tensors)
        return function(self.logits(hidden).flatten(0, 1), *parts).view(hidden.shape[:-1])


def _batch(rows: int = 4) -> Batch:
    """Rows of 6 tokens, of different weights, some without a target."""
    tokens = torch.arange(6 * rows).reshape(rows, 6) % VOCAB
    targets = (tokens + 1) % VOCAB
    targets[:, 5] = IGNORE_INDEX
    weights = (torch.arange(1.0, 6 * rows + 1).reshape(rows, 6) / 7).masked_fill(targets == IGNORE_INDEX, 0)
    return Batch(tokens, targets, torch.arange(6).repeat(rows, 1), torch.zeros_like(tokens), weights)


def _rows(batch: Batch, first: int, last: int) -> Batch:
    rows = slice(first, last)
    return Batch(
        tokens=batch.tokens[rows],
        targets=batch.targets[rows],
        positions=batch.positions[rows],
        document_ids=batch.document_ids[rows],
        weights=batch.weights[rows],
        reference=None if batch.reference is None else batch.reference[rows],
    )


def _hidden(rows: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(rows, 6, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()


def _ready(loss: Loss) -> Loss:
    """The loss with its module, if it has one, off the meta device, in float64, and with initial values."""
    if (module := module_of(loss)) is not None:
        module.to_empty(device="cpu").double()
        torch.manual_seed(3)
        for owner in module.modules():
            if isinstance(owner, BufferOwner):
                owner.reset_parameters()
    return loss


def _computed(loss: Loss, hidden: Tensor, head: _Head, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """What a loss makes of a batch, which has a reference if the loss compares with one: other hidden states."""
    if isinstance(loss, Referenced):
        with torch.no_grad():
            batch = attrs.evolve(batch, reference=loss.token_logps(hidden.flip(2), head, batch))
    return loss.loss(hidden, head, batch)


def _sums(found: tuple[Tensor, Tensor, dict[str, Tensor]]) -> dict[str, Tensor]:
    total, weight, sums = found
    return {"the loss": total.detach(), "the weight": weight, **sums}


def losses_are_sums(loss: Loss) -> None:
    """Loss and weight are single numbers, the loss can be differentiated, and the weight is that of the batch."""
    hidden, head, batch = _hidden(), _Head(), _batch()
    total, weight, _ = _computed(_ready(loss), hidden, head, batch)
    for name, each in (("the loss", total), ("the weight", weight)):
        expect(each.ndim == 0, f"{name} is no single number but a tensor of shape {tuple(each.shape)}")
    expect(total.requires_grad, "the loss can't be differentiated")
    grads = torch.autograd.grad(total, (hidden, head.weight), allow_unused=True)
    expect(grads[0] is not None and bool(grads[0].any()), "the loss does not depend on the hidden states")
    expect(grads[0] is not None and bool(grads[0].isfinite().all()), "a gradient is not finite")
    expect(torch.allclose(weight.double(), batch.weights.double().sum()), f"the weight is {weight.item()}")


def rows_add_up(loss: Loss) -> None:
    """The sums of some rows and those of the others add up to the sums of all, so that microbatches may be any."""
    hidden, head, batch = _hidden(), _Head(), _batch()
    whole = _sums(_computed(_ready(loss), hidden, head, batch))
    parts = [_sums(_computed(loss, hidden[a:b], head, _rows(batch, a, b))) for a, b in ((0, 1), (1, 4))]
    for name, each in whole.items():
        expect(all(name in part for part in parts), f"{name} is not in every microbatch")
        summed = parts[0][name].double() + parts[1][name].double()
        expect(torch.allclose(each.double(), summed), f"of parts, {name} is {summed.tolist()}, of all {each.tolist()}")


def tokens_count_by_their_weights(loss: Loss) -> None:
    """With twice the weights all sums are twice as large, and a token of weight 0 has no part in them."""
    hidden, head, batch = _hidden(), _Head(), _batch()
    one = _sums(_computed(_ready(loss), hidden, head, batch))
    two = _sums(_computed(loss, hidden, head, attrs.evolve(batch, weights=2 * batch.weights)))
    for name, each in one.items():
        expect(torch.allclose(2 * each.double(), two[name].double()), f"with twice the weights {name} is not doubled")
    # Not even a NaN may come of it: 0 / 0 in a mean over no tokens would.
    none = attrs.evolve(batch, weights=torch.zeros_like(batch.weights))
    for name, each in _sums(_computed(loss, hidden, head, none)).items():
        expect(not bool(each.any()), f"where no token counts, {name} is {each.tolist()}")


def the_model_sees_tokens(loss: Loss) -> None:
    """The first stage gets as many rows and tokens as the batch has, and all stages their positions and documents."""
    tokens, shared = loss.inputs(_batch())
    expect(
        tokens.shape == shared.positions.shape == shared.document_ids.shape == (4, 6), "the model sees another shape"
    )


def _expect_same_sums(sums: Tensor, expected: Tensor, what: str) -> None:
    expect(sums.shape == (2,) and sums.dtype == torch.float64, f"the sums are {sums.dtype} of shape {sums.shape}")
    close = torch.allclose(sums, expected, rtol=1e-4)
    expect(close, f"{what}, loss and weight are {sums.tolist()} and not {expected.tolist()}")


def _trained(executor: Executor, batches: Sequence[Batch]) -> Tensor:
    """Return the sums of losses and weights of a training pass, float64 (2,)."""
    state = state_of_batches(batches)
    executor.train(state)
    return sum_losses(state)


def _evaluated(executor: Executor, batches: Sequence[Batch]) -> Tensor:
    """Return the sums of losses and weights of an evaluation, float64 (2,)."""
    state = state_of_batches(batches)
    executor.evaluate(state)
    return sum_losses(state)


def training_and_evaluation_measure_the_same(executor: Executor) -> None:
    """Training and evaluating the same microbatches gives the same loss and weight."""
    trained = _trained(executor, [_batch()])
    expect(bool(trained[0].isfinite()), f"the loss is {trained[0].item()}")
    _expect_same_sums(_evaluated(executor, [_batch()]), trained, "evaluated")


def microbatches_add_up(executor: Executor) -> None:
    """The sums of a batch do not depend on the microbatches into which it is cut."""
    whole, cut = [_batch()], [_rows(_batch(), row, row + 1) for row in range(4)]
    _expect_same_sums(_evaluated(executor, cut), _evaluated(executor, whole), "in four microbatches")
    _expect_same_sums(_trained(executor, cut), _trained(executor, whole), "trained in four microbatches")


def evaluation_changes_nothing(executor: Executor) -> None:
    """A second evaluation gives the same sums, and one of no microbatches gives zeros."""
    first, second, none = (_evaluated(executor, batches) for batches in ([_batch()], [_batch()], []))
    _expect_same_sums(second, first, "evaluated again")
    expect(not none.any(), "without microbatches there is a loss")


def _logits(predictor: Predictor, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
    """Logits of tokens; empty on a rank that has none."""
    shared = BatchContext(torch.arange(6).repeat(len(tokens), 1), torch.zeros_like(tokens))
    if documents is not None:
        shared = attrs.evolve(shared, document_ids=documents)
    found = predictor.infer(tokens, shared)
    if found is None:
        return torch.empty(*tokens.shape, 0)
    expect(found.ndim == 3 and found.shape[:2] == tokens.shape, f"logits have the shape {tuple(found.shape)}")
    return found


def later_tokens_do_not_matter(predictor: Predictor) -> None:
    """A token's logits depend on it and on earlier tokens of its row, and not on later ones."""
    tokens = torch.arange(12).reshape(2, 6) % VOCAB
    changed = tokens.clone()
    changed[0, 3] = (tokens[0, 3] + 1) % VOCAB
    one, other = _logits(predictor, tokens), _logits(predictor, changed)
    expect(torch.allclose(one[0, :3], other[0, :3], atol=1e-4), "a later token changes the logits of earlier ones")
    expect(torch.allclose(one[1], other[1], atol=1e-4), "a token changes the logits of another row")
    expect(not one.numel() or not torch.allclose(one[0, 3], other[0, 3]), "a token does not change its own logits")


def other_documents_do_not_matter(predictor: Predictor) -> None:
    """A token's logits do not depend on the tokens of another document of its row."""
    tokens, documents = torch.arange(6)[None] % VOCAB, torch.tensor([[0, 0, 0, 1, 1, 1]])
    changed = torch.where(documents == 0, (tokens + 1) % VOCAB, tokens)
    one, other = _logits(predictor, tokens, documents), _logits(predictor, changed, documents)
    expect(torch.allclose(one[0, 3:], other[0, 3:], atol=1e-4), "a document changes the logits of the next")
