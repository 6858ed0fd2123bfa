"""Schedules, programs and their executor."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import attrs
from torch import Tensor

from drawloom.components.ports.data import Batch
from drawloom.components.ports.model import BatchContext
from drawloom.components.ports.pipeline_state import PipelineState
from drawloom.components.ports.program import Program
from drawloom.graph import port


@port
class Schedule(Protocol):
    """A pure function from (ranks, microbatches) to a program, for any number of either."""

    @property
    def stages_per_rank(self) -> int:
        """How many stages each rank holds."""
        ...

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        """For each stage the rank that holds it."""
        ...

    def program(self, ranks: int, microbatches: int) -> Program:
        """What each rank computes, in order."""
        ...


@attrs.frozen
class Losses:
    """
    What a pass over microbatches gave on this rank: float64 sums of weighted losses and of their weights.

    On the rank of the last stage `state` holds them by microbatch too, as `loss` and `weight` of shape (microbatches,).
    """

    total: Tensor
    weight: Tensor
    state: PipelineState | None = None


@port
class Loss(Protocol):
    """What is learned: how a batch enters the model, and what its output is worth."""

    def inputs(self, batch: Batch) -> tuple[Tensor, BatchContext]:
        """What the first stage takes, and what all stages share."""
        ...

    def loss(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The sum of the weighted losses, to be differentiated, and the sum of the weights; both 0-dimensional."""
        ...


@port
class Executor(Protocol):
    """Carries a program out on this rank's stages."""

    def train(self, microbatches: Sequence[Batch]) -> Losses:
        """Forward and backward; gradients of the sum of losses are added to the parameters'."""
        ...

    def evaluate(self, microbatches: Iterator[Batch]) -> Losses:
        """Forward only, nothing kept."""
        ...


@port
class Predictor(Protocol):
    """A model at work."""

    def infer(self, tokens: Tensor, shared: BatchContext) -> Tensor | None:
        """The model's output for one microbatch, on the rank that holds the last stage; None on others."""
        ...
