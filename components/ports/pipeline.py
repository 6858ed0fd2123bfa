"""Ports of pipeline schedules and their executor, and the losses that the executor writes into a step's state."""

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
    """A pure function of the numbers of ranks and microbatches to a program."""

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        """Return the rank of each stage; all ranks have equally many stages."""
        ...

    def program(self, ranks: int, microbatches: int) -> Program:
        """Return the actions of each rank, in order."""
        ...


@runtime_checkable
class PartialSchedule(Protocol):
    """A schedule that computes the actions of some ranks alone, so that a rank builds only the part it needs."""

    def program_of(self, wanted: Collection[int], ranks: int, microbatches: int) -> Program:
        """Return the same program with the actions of at least the `wanted` ranks; other ranks may have none."""
        ...


@runtime_checkable
class PartitioningSchedule(Protocol):
    """A schedule that chooses the number of layers in each stage; other schedules divide layers evenly."""

    def layers_by_stage(self, ranks: int, layers: int) -> Sequence[int]:
        """Return the number of layers in each stage, at least 1. Raises UserError if `layers` can't be divided."""
        ...


@runtime_checkable
class LayersOnlySchedule(Protocol):
    """A schedule with stages of layers alone; every rank also has the embedding and the head."""

    embeds_on_every_rank: ClassVar[bool]


def embeds_on_every_rank(schedule: object) -> bool:
    """Return whether a schedule, an object or a class, has the embedding and the head on every rank."""
    return isinstance(schedule, LayersOnlySchedule) and schedule.embeds_on_every_rank


@runtime_checkable
class RecomputingSchedule(Protocol):
    """A schedule that chooses a policy of activation checkpointing for each stage."""

    @property
    def recompute(self) -> Mapping[Any, Any]:
        """The costs by policy; without costs, nothing is recomputed."""
        ...


def chooses_recompute(schedule: object) -> bool:
    """Return whether a schedule chooses the activation checkpointing of stages."""
    return isinstance(schedule, RecomputingSchedule) and bool(schedule.recompute)


@runtime_checkable
class OuterLayersSchedule(Protocol):
    """
    A `LayersOnlySchedule` with only the first layers of a model in its stages.

    Each rank also has the remaining layers with its head, and computes both for its share of the microbatches.
    """

    def layers_in_stages(self, ranks: int, layers: int) -> int:
        """Return the number of layers in all stages together. Raises UserError if `layers` can't be divided."""
        ...


LOSSES = "losses"
"""
The name of the losses in the state of a step and in the state of an evaluation.

A microbatch's value is a dict: `loss`, the sum of its weighted losses, and `weight`, the sum of the weights, both of
shape (), and `sums`, a dict of further sums (...) by name. In the global view they are stacked: (microbatches, ...).
Ranks without the last stage have the losses of 0 microbatches.
"""

STEP_SPECS: Mapping[str, SpecTree] = {"batches": Stack(), LOSSES: Stack(), METRIC_TOTALS: Replicate()}
"""The division into microbatches of the step's values that are not numbers."""


def state_of_batches(batches: Iterable[Batch]) -> StepState:
    """Return a state with these microbatches as `batches` and room for their losses, for example for an evaluation."""
    microbatches = list(batches)
    return StepState({"batches": microbatches}, microbatches=len(microbatches), specs=STEP_SPECS)


def sum_losses(state: StepState) -> Tensor:
    """Sum the weighted losses and their weights over this rank's microbatches: float64 (2,)."""
    losses = state[LOSSES]
    # In float32, the sum over thousands of microbatches would have visible rounding errors.
    return torch.stack([losses[name].double().sum() for name in ("loss", "weight")])


@port
class Loss(Protocol):
    """
    The objective of training: selects the model's inputs from a batch and computes the loss of the final hidden states.

    A loss with its own parameters is a `TrainableLoss`; a loss that compares pairs of documents is `PairedDocuments`.

    A batch is of the class that the data set declares; a loss may rely on the leaves in `batch_leaves`.
    """

    @property
    def batch_leaves(self) -> tuple[str, ...]:
        """The names of the leaves that `inputs` and `loss` read, as a class attribute."""
        ...

    def inputs(self, batch: Any) -> tuple[Any, BatchContext]:
        """Return the first stage's input (token ids (rows, length) for a decoder) and the context of all stages."""
        ...

    def loss(self, hidden: Any, head: Any, batch: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """
        Return the sum of the weighted losses, for differentiation; the sum of the weights; and further sums by name.

        hidden: the last hidden states, (rows, length, hidden_size) for a decoder; `head` (a Head for a decoder)
        computes losses or logits from them. Loss and weight are 0-dimensional; a named sum is 0-dimensional or a tensor
        of counts of a fixed shape. Reports divide each sum by the sum of the weights, both over microbatches and
        replicas, so the loss of some rows is a sum over rows or tokens weighted by `batch.weights`. All microbatches
        have the same named sums.
        """
        ...


@runtime_checkable
class TrainableLoss(Protocol):
    """
    A loss with its own parameters.

    Its module becomes part of the last stage under the name `loss`: the parameters are materialized, synced, clipped,
    trained and saved like other parameters, but not exported.
    """

    module: nn.Module | None
    """The module of the parameters, which fills them in `reset_parameters()`; None if there are no parameters."""


def module_of(loss: object) -> nn.Module | None:
    """Return the module of a loss with its own parameters, else None."""
    return loss.module if isinstance(loss, TrainableLoss) else None


@runtime_checkable
class Referenced(Protocol):
    """
    A loss that compares the model with a reference model, whose log-probabilities are a leaf of the batch.

    `reference` selects the reference model: "adapters" is the model without adapters; with "data", log-probabilities of
    another model are in the data.
    """

    reference: Literal["adapters", "data"]

    def token_logps(self, hidden: Tensor, head: Head, batch: Any) -> Tensor:
        """
        Return the log-probability of each target, (rows, length), under the model without adapters.

        hidden: its last hidden states (rows, length, hidden_size). Called without gradients; `batch` has no reference.
        """
        ...

    def with_reference(self, batch: Any, logps: Tensor) -> Any:
        """Return the batch with the reference model's log-probabilities (rows, length)."""
        ...


@port
class Executor(Protocol):
    """Executor of the schedule's program on this rank's stages."""

    def train(self, state: StepState) -> None:
        """
        Run the forward and backward passes of `batches`, a list of one Batch for each microbatch of the state.

        Accumulates the gradients of the summed losses in the parameters' gradients (gradient accumulation), and writes
        `losses` into the state.
        """
        ...

    def evaluate(self, state: StepState) -> None:
        """Run the forward passes of `batches` and write `losses` into the state; nothing else is kept."""
        ...


@port
class Predictor(Protocol):
    """Inference over all stages: logits of tokens."""

    def infer(self, tokens: Tensor, shared: TokenContext) -> Tensor | None:
        """
        Return logits (rows, length, vocab_size) of tokens (rows, length) on the last stage's rank; None on other ranks.
        """
        ...
