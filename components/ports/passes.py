"""Ports for features around passes: nodes composed around an executor's programs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

import attrs
from torch import Tensor

from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.features import Feature, WrappingOrder
from drawloom.components.ports.model import BatchContext, Finish, Head
from drawloom.components.ports.pipeline import Loss, Referenced
from drawloom.components.ports.program import Action, Program
from drawloom.components.ports.stages import Shards, Stage, Stages
from drawloom.components.state.batch import Batch
from drawloom.components.state.step_state import StepState
from drawloom.graph import Problem, port
from drawloom.graph.wiring.node import NodeView

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
