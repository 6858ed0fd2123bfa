"""Ports for pipeline schedules and their executor, for features around passes, and for the losses in a step's state."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor, nn

from drawloom import NodeView, Problem, port
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.features import Feature, WrappingOrder
from drawloom.components.ports.model import BatchContext, Finish, Head, TokenContext
from drawloom.components.ports.program import Action, Program
from drawloom.components.ports.stages import Shards, Stage, Stages
from drawloom.components.ports.tracking import METRIC_TOTALS
from drawloom.components.state.batch import Batch
from drawloom.components.state.step_state import StepState
from drawloom.components.state.trees import Spec


@runtime_checkable
class RecordableFinish(Protocol):
    """
    `Finish` as a tree (`components/state/trees.py`): a recorded pass copies the tensors in it, and calls it.

    Its other values are equal in all passes over one token after the same cache.
    """

    is_recordable: ClassVar[bool]

    def __call__(self, hidden: Tensor, head: Head) -> Any:
        """Return a tree of tensors, without reading a tensor's value on the host."""


@port
class Schedule(Protocol):
    """Pipeline schedule: a pure function from rank and microbatch counts to a program."""

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        """Return ranks by stage; all ranks have equally many stages."""

    def program(self, ranks: int, microbatches: int) -> Program:
        """Return the ranks' actions, in order."""


@runtime_checkable
class PartialSchedule(Protocol):
    """A schedule that computes some ranks' actions alone, so a rank builds only the part it needs."""

    def program_for_ranks(self, wanted: Collection[int], ranks: int, microbatches: int) -> Program:
        """Return `program` for the `wanted` ranks only; other ranks' actions may be missing, which saves time."""


@runtime_checkable
class PartitioningSchedule(Protocol):
    """A schedule that chooses layer counts by stage; other schedules divide layers evenly."""

    def layers_by_stage(self, ranks: int, layers: int) -> Sequence[int]:
        """Return layer counts by stage, at least 1. Raises UserError if `layers` can't be divided."""


@runtime_checkable
class LayersOnlySchedule(Protocol):
    """A schedule whose stages contain only layers; every rank also has the embedding and the head."""

    embeds_on_every_rank: ClassVar[bool]


def embeds_on_every_rank(schedule: object) -> bool:
    """Return whether a schedule, an object or a class, has the embedding and the head on every rank."""
    return isinstance(schedule, LayersOnlySchedule) and schedule.embeds_on_every_rank


@runtime_checkable
class RecomputingSchedule(Protocol):
    """A schedule that chooses an activation checkpointing policy per stage."""

    @property
    def recompute(self) -> Mapping[Any, Any]:
        """Costs by activation checkpointing policy; if there are none, nothing is recomputed."""


def chooses_recompute(schedule: object) -> bool:
    """Return whether a schedule chooses activation checkpointing policies."""
    return isinstance(schedule, RecomputingSchedule) and bool(schedule.recompute)


@runtime_checkable
class OuterLayersSchedule(Protocol):
    """
    A `LayersOnlySchedule` with only a model's first layers in its stages.

    Every rank also has the remaining layers and the head, and computes both for its share of the microbatches.
    """

    def get_pipelined_layer_count(self, ranks: int, layers: int) -> int:
        """Return the layer count over all stages. Raises UserError if `layers` can't be divided."""


LOSSES = "losses"
"""
The name of the losses in the state of a step and in the state of an evaluation.

A microbatch's value is a dict: `loss`, the sum of its weighted losses, and `weight`, the sum of the weights, both of
shape (), and `sums`, a dict of further sums (...) by name. In the global view they are stacked: (microbatches, ...).
Ranks without the last stage have the losses of 0 microbatches.
"""

ROLLOUTS = "rollouts"
"""The name of the sampled and scored completions in the state of a step: a list of `rollouts.Scored`, by microbatch."""

STEP_SPECS: Mapping[str, Spec] = {
    "batches": "stack",
    ROLLOUTS: "stack",
    LOSSES: "stack",
    METRIC_TOTALS: "replicate",
}
"""The division into microbatches of the step's values that are not numbers."""


def create_step_state(batches: Iterable[Batch]) -> StepState:
    """Return a state with microbatches as `batches` and room for their losses, for example for an evaluation."""
    microbatches = list(batches)
    return StepState({"batches": microbatches}, microbatches=len(microbatches), specs=STEP_SPECS)


def sum_losses_and_weights(state: StepState) -> Tensor:
    """Sum the weighted losses and their weights over this rank's microbatches: float64 (2,)."""
    losses = state[LOSSES]
    # In float32, the sum over thousands of microbatches would have visible rounding errors.
    return torch.stack([losses[name].double().sum() for name in ("loss", "weight")])


LossSums = tuple[Tensor, Tensor, dict[str, Tensor]]
"""A weighted loss sum, for differentiation; the weight sum; and further sums by name."""


@port
class Loss(Protocol):
    """
    Training loss: selects the model's inputs from a batch and computes the loss from the final hidden states.

    A loss with its own parameters is a `TrainableLoss`; a loss over document pairs is `PairedDocuments`.

    The data set declares the batch class; a loss may rely on the leaves in `batch_leaves`.
    """

    @property
    def batch_leaves(self) -> tuple[str, ...]:
        """Names of leaves that `inputs` and `loss` read, as a class attribute."""

    def inputs(self, batch: Any) -> tuple[Any, BatchContext]:
        """Return the first stage's input (token ids (rows, length) for a decoder) and the context for all stages."""

    def loss(self, hidden: Any, head: Any, batch: Any) -> LossSums:
        """
        Return the sums for a microbatch.

        hidden: the last hidden states, (rows, length, hidden_size) for a decoder; `head` (a Head for a decoder)
        computes losses or logits from them. Loss and weight are 0-dimensional; a named sum is 0-dimensional or a count
        tensor with a fixed shape. Reports divide sums by the weight sum, both over microbatches and replicas, so a loss
        must be a sum over rows or tokens, weighted by `batch.weights`. All microbatches have the same named sums. A
        name such as `largest_norm` is a maximum, over all microbatches.
        """


@runtime_checkable
class TrainableLoss(Protocol):
    """
    A loss with its own parameters.

    Its module becomes the last stage's submodule `loss`: the parameters are materialized, synced, clipped, trained and
    saved like other parameters. An export has only a `Scorer`'s or a `LayeredLoss`'s parameters.
    """

    module: nn.Module | None
    """Module with the parameters, filled by `reset_parameters()`; None without parameters."""


def find_loss_module(loss: object) -> nn.Module | None:
    """Return the loss's module if it has its own parameters, else None."""
    return loss.module if isinstance(loss, TrainableLoss) else None


Reference = Literal["adapters", "model", "data", "none"]
"""Model with which a loss compares the trained one; see `Referenced`."""


@runtime_checkable
class Referenced(Protocol):
    """
    A loss that compares the model with a reference model or a teacher, whose values are batch leaves.

    `reference` selects the other model: "adapters" is the model without adapters, "model" the recipe's frozen model
    (the port FrozenModel); with "data", another model's values are in the data; "none" switches the comparison off.
    """

    @property
    def reference(self) -> Reference:
        """Where the reference values come from."""

    def reference_values(self, hidden: Tensor, head: Head, batch: Any) -> Any:
        """
        Return the other model's values that the loss needs, such as log-probabilities (rows, length).

        hidden: the other model's last hidden states (rows, length, hidden_size); head: its head, which stays valid for
        the step. Called without gradients; `batch` has no reference values.
        """

    def with_reference(self, batch: Any, values: Any) -> Any:
        """Return the batch with the other model's values."""


@runtime_checkable
class MeasuresStep(Protocol):
    """
    A loss that depends on sums over all microbatches and ranks of the step, such as KTO's reference point.

    A pass without gradients measures them before the step's first backward pass.
    """

    def compute_part_of_step_sums(self, hidden: Tensor, head: Head, batch: Any) -> Tensor:
        """
        Return a microbatch's part of the step's sums, float64 (sums,), from hidden states (rows, length, hidden_size).

        The executor adds up the parts of all microbatches and ranks, and calls `with_step_sums` with the result.

        Called without gradients; `batch` has its reference values, if the loss is `Referenced`.
        """

    def with_step_sums(self, batch: Any, sums: Tensor) -> Any:
        """Return the batch with the sums over the step's microbatches and ranks, float64 (sums,), for `loss`."""


@port
@runtime_checkable
class Scorer(Protocol):
    """
    A loss whose own parameters score documents, such as a reward model's or a classifier's.

    Its module is a head for transformers' AutoModelForSequenceClassification: the only parameter is `weight`, (labels,
    hidden_size), which exports write as `score.weight`.
    """

    @property
    def output_names(self) -> Sequence[str]:
        """Names of the scores of a document; several are the labels of a classifier."""

    def score_tokens(self, hidden: Tensor) -> Tensor:
        """
        Return scores by token, at least float32 (rows, length, names), from hidden states (rows, length, hidden_size).

        A document's scores are those of its last token. Called inside the last stage's forward pass.
        """


SCORE = "score.weight"
"""Name of a head's weight in folders of transformers' AutoModelForSequenceClassification, (labels, hidden_size)."""


@port
class Executor(Protocol):
    """Executor for the schedule's program on this rank's stages."""

    def run_forward_and_backward(self, state: StepState) -> None:
        """
        Run forward and backward passes over the state's `batches`, a list with one Batch per microbatch.

        Add the summed losses' gradients to the parameters' gradients (gradient accumulation), and write `losses` into
        the state.
        """

    def evaluate(self, state: StepState) -> None:
        """Run forward passes over `batches`, and write only `losses` into the state."""

    def rerun_passes_for_comparison(self, state: StepState) -> None:
        """Run the forward and backward passes once more, for a comparison; routers do not count tokens again."""

    def infer(self, tokens: Tensor, shared: TokenContext) -> Tensor | None:
        """
        Return logits (rows, length, vocab_size) for tokens (rows, length) on the last stage's rank; None elsewhere.
        """

    def infer_microbatches(
        self,
        microbatches: Sequence[tuple[Tensor, BatchContext]],
        on_output: Callable[[int, Any], None],
        finish: Finish,
    ) -> None:
        """
        Run microbatches of tokens (rows, length) forward without gradients.

        On the last stage's rank, `on_output` gets a microbatch's number and the `finish` result.
        """


@port
class PassObserver(Protocol):
    """A node that adds up values over the training passes of a step."""

    def forget_passes(self) -> None:
        """Drop what the step's passes have added, because they are repeated."""


PassKind = Literal["training", "evaluation", "inference"]
"""A program's purpose: a step's passes, forward passes with the loss, or forward passes with another result."""

Compute = Callable[[Tensor, Head, Any], Any]
"""Function to call with the last hidden states, the head and the batch, in place of the loss."""

Operation = Callable[[Action], None]
"""Function to run an action."""


@attrs.frozen
class MicrobatchInputs:
    """
    Microbatch for the stages: the first stage's inputs, such as token ids, and the context for all stages.

    The last stage computes the loss with `batch`; without a batch it returns `finish`'s result.
    """

    inputs: Any
    shared: BatchContext
    batch: Batch | None = None
    finish: Finish | None = None


Microbatches = Sequence[MicrobatchInputs]


class RunnableStage(Protocol):
    """
    One stage's passes in a program; `split` divides its backward pass into two parts.

    The last stage writes microbatch losses into `state`. Every floating-point leaf between stages is differentiable:
    its gradient is sent back, as zeros if nothing depends on the leaf, so both ranks know the messages in advance.
    """

    stage: Stage
    objective: Loss
    state: StepState
    split: bool
    last: bool
    """Whether this is the last stage, which has the head."""

    def forward(
        self, microbatch: int, inputs: Any, shared: BatchContext, batch: Batch | None, finish: Finish | None = None
    ) -> Any:
        """
        Return the stage's output for a microbatch, detached from its graph: a tree of tensors, or the loss at the end.

        Without a batch the last stage returns `finish`'s result for the last hidden states and the head.
        """

    def backward(self, microbatch: int, grads: list[Tensor] | None) -> list[Tensor]:
        """
        Run the whole backward pass, and return gradients for the input's floating-point leaves.

        `grads` are the gradients of the output's floating-point leaves, or None for a loss, whose gradient is 1.
        """

    def backward_input(self, microbatch: int, grads: list[Tensor] | None) -> list[Tensor]:
        """Run I: like `backward`, with weight gradients left for W. Return the input leaves' gradients."""

    def backward_weight(self, microbatch: int) -> None:
        """Run W: accumulate the weight gradients, and reduce every part after `reduce_in_next_backward`."""

    def list_inputs_and_outputs(self, microbatch: int) -> list[Tensor]:
        """Return the leaves kept from a microbatch's forward pass until its backward pass."""

    @property
    def shards(self) -> Shards:
        """The stage's shards, which gather parameters and reduce gradients; ValueError if it has none."""

    def reduce_in_next_backward(self, is_last_in_step: bool) -> None:
        """Reduce gradients with the next backward pass; if `is_last_in_step`, they are then complete for the step."""


class PassRun(Protocol):
    """A program's run on this rank's stages, by number."""

    kind: PassKind
    actions: Sequence[Action]
    microbatches: Microbatches
    stages: Mapping[int, RunnableStage]


class ForwardRunner(Protocol):
    """An executor, for features with passes before its programs."""

    stages: Stages
    objective: Loss
    mesh: Mesh

    def run_forward(self, compute: Compute, microbatches: Microbatches, model: Stages | None = None) -> dict[int, Any]:
        """
        Run forward passes without gradients, and return `compute`'s results by microbatch on the last stage's rank; {}
        on others.

        With other stages on the same ranks as `model`, the gathered parameters of its last stage stay, with the head.
        """


def add_reference_values(loss: Referenced, microbatches: Microbatches, values: Mapping[int, Any]) -> Microbatches:
    """Return microbatches with a reference model's values in their batches, if there are any on this rank."""
    return [
        attrs.evolve(inputs, batch=loss.with_reference(inputs.batch, values[number])) if number in values else inputs
        for number, inputs in enumerate(microbatches)
    ]


@port
class PassFeature(Feature):
    """
    A feature composed around an executor's programs. Derive from this class: its members do nothing.

    An executor calls a recipe's features sorted by `order`, and else in the recipe's order. It knows no feature;
    without the node, nothing is imported.
    """

    order: ClassVar[WrappingOrder] = WrappingOrder.LAUNCH

    @classmethod
    def check_passes(cls, feature: NodeView, executor: NodeView) -> Iterator[Problem]:
        """Yield problems if the executor can't have the feature."""
        yield from ()

    def change_program(self, program: Program) -> Program:
        """Return the program for a training step, with other policies or stages to offload."""
        return program

    def prepare_inputs(self, microbatches: Microbatches, runner: ForwardRunner) -> Microbatches:
        """Return microbatches with more in their batches, before training and evaluation."""
        return microbatches

    def start_run(self, run: PassRun, operations: Mapping[str, Operation]) -> Mapping[str, Operation]:
        """
        Return the functions to run a program's actions, by op, before the first one; may assign `run.microbatches` and
        `run.stages`.
        """
        return operations

    def end_run(self, run: PassRun) -> None:
        """Act after a program's last action, and before gradients go to the optimizer's parameters."""
