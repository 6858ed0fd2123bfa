"""Schedules, programs, their executor, and the losses that it writes into the state of a step."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from drawloom.components.ports.model import BatchContext, Head, TokenContext
from drawloom.components.ports.program import Program
from drawloom.components.ports.run import METRIC_TOTALS
from drawloom.components.state.batch import Batch
from drawloom.components.state.specs import Replicate, SpecTree, Stack
from drawloom.components.state.step_state import StepState
from drawloom.graph import port


@port
class Schedule(Protocol):
    """A pure function from (ranks, microbatches) to a program, for any numbers of them."""

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        """The rank that holds each stage; every rank holds as many."""
        ...

    def program(self, ranks: int, microbatches: int) -> Program:
        """The actions of each rank, in order."""
        ...


@runtime_checkable
class PartialSchedule(Protocol):
    """A schedule that knows what some ranks do without what the others do, so that a rank builds what it needs."""

    def program_of(self, wanted: Collection[int], ranks: int, microbatches: int) -> Program:
        """The same program with the actions of these ranks at least; others may have none."""
        ...


@runtime_checkable
class PartitioningSchedule(Protocol):
    """A schedule that says how many layers each stage has; those of others have about as many as one another."""

    def layers_by_stage(self, ranks: int, layers: int) -> Sequence[int]:
        """Of each stage, at least 1, and all `layers` together; UserError if that can't be."""
        ...


@runtime_checkable
class LayersOnlySchedule(Protocol):
    """A schedule whose stages are layers alone: every rank has the embedding and the head, too."""

    embeds_on_every_rank: ClassVar[bool]


def embeds_on_every_rank(schedule: object) -> bool:
    """Return whether every rank of a schedule, which is an object or a class, has the embedding and the head."""
    return isinstance(schedule, LayersOnlySchedule) and schedule.embeds_on_every_rank


@runtime_checkable
class RecomputingSchedule(Protocol):
    """A schedule with its own choice of what each stage recomputes, among policies with given costs."""

    @property
    def recompute(self) -> Mapping[Any, Any]:
        """The costs by policy; without any, nothing is recomputed."""
        ...


def chooses_recompute(schedule: object) -> bool:
    """Return whether a schedule chooses what stages recompute."""
    return isinstance(schedule, RecomputingSchedule) and bool(schedule.recompute)


@runtime_checkable
class OuterLayersSchedule(Protocol):
    """
    A `LayersOnlySchedule` whose stages have the first layers of a model only.

    Each rank has the other layers with its head, and computes them for the microbatches for which it has the head.
    """

    def layers_in_stages(self, ranks: int, layers: int) -> int:
        """Return how many of a model's layers all stages have together; UserError if that can't be."""
        ...


LOSSES = "losses"
"""
The name of the losses in the state of a step, and in the state of an evaluation.

A microbatch's value is a dict: `loss`, the sum of its weighted losses, and `weight`, the sum of the weights, both of
shape (), and `sums`, a dict of further sums (...) by name. In the global view they are stacked: (microbatches, ...).
Ranks without the last stage have the losses of 0 microbatches.
"""

STEP_SPECS: Mapping[str, SpecTree] = {"batches": Stack(), LOSSES: Stack(), METRIC_TOTALS: Replicate()}
"""How the values of a step that are not numbers are divided into microbatches."""


def state_of_batches(batches: Iterable[Batch]) -> StepState:
    """Return the state of a pass over microbatches, such as an evaluation: their `batches`, with room for losses."""
    listed = list(batches)
    return StepState({"batches": listed}, microbatches=len(listed), specs=STEP_SPECS)


def sum_losses(state: StepState) -> Tensor:
    """Return the sums over this rank's microbatches of the weighted losses and of their weights, float64 (2,)."""
    losses = state[LOSSES]
    # A step may have thousands of microbatches: float32 would add up their losses with visible rounding.
    return torch.stack([losses[name].double().sum() for name in ("loss", "weight")])


@port
class Loss(Protocol):
    """
    The objective of training: what the model gets of a batch, and the loss of the hidden states that it gives.

    A loss with parameters of its own is a `TrainableLoss`; one that compares pairs of documents, `PairedDocuments`.

    A batch is of the class that the data set declares; a loss may expect that it has the leaves in `batch_leaves`.
    """

    @property
    def batch_leaves(self) -> tuple[str, ...]:
        """The names of the leaves that `inputs` and `loss` read, a class attribute."""
        ...

    def inputs(self, batch: Any) -> tuple[Any, BatchContext]:
        """The first stage's input, of a decoder token ids (rows, length), and the context of all stages."""
        ...

    def loss(self, hidden: Any, head: Any, batch: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """
        The sum of the weighted losses, to be differentiated; the sum of the weights; and further sums by name.

        hidden: the last hidden states, of a decoder (rows, length, hidden_size), from which `head`, of a decoder a
        Head, makes losses or logits. Loss and weights are 0-dimensional; a named sum is, too, or it is a tensor of
        counts of a fixed shape. What is reported is a sum divided by that of the weights, each over microbatches and
        replicas, so a loss of some rows is a sum over them or their tokens, in which each counts by `batch.weights`.
        The named sums are the same in every microbatch.
        """
        ...


@runtime_checkable
class TrainableLoss(Protocol):
    """
    A loss with parameters of its own.

    Its module becomes part of the last stage under the name `loss`: the parameters are made real, synced, clipped,
    trained and saved like any others, and left out of exports.
    """

    module: nn.Module | None
    """The owner of the parameters, which fills them in `reset_parameters()`; None if there are none."""


def module_of(loss: object) -> nn.Module | None:
    """Return the module of a loss with parameters of its own, else None."""
    return loss.module if isinstance(loss, TrainableLoss) else None


@runtime_checkable
class Referenced(Protocol):
    """
    A loss that compares the model with another, whose log-probabilities are a leaf of the batch.

    `reference` says which: "adapters", the model without them, or "data", the one that the data have numbers of.
    """

    reference: Literal["adapters", "data"]

    def token_logps(self, hidden: Tensor, head: Head, batch: Any) -> Tensor:
        """
        The log-probability of each target (rows, length), of the last hidden states of the model without adapters.

        hidden: (rows, length, hidden_size); it is called without gradients, and `batch` has no reference.
        """
        ...

    def with_reference(self, batch: Any, logps: Tensor) -> Any:
        """Return the batch with the other model's log-probabilities (rows, length)."""
        ...


@port
class Executor(Protocol):
    """Runs the schedule's program on this rank's stages."""

    def train(self, state: StepState) -> None:
        """
        Run the forward and backward passes of `batches`, a list of one Batch for each microbatch of the state.

        Adds the gradients of the sum of losses to the parameters' gradients, and writes `losses` into the state.
        """
        ...

    def evaluate(self, state: StepState) -> None:
        """Run the forward passes of `batches`, and write `losses` into the state; nothing else is kept."""
        ...


@port
class Predictor(Protocol):
    """Computes logits with the model, over all stages."""

    def infer(self, tokens: Tensor, shared: TokenContext) -> Tensor | None:
        """Logits (rows, length, vocab_size) for tokens (rows, length), on the last stage's rank; None on others."""
        ...
