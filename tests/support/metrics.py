"""Metrics on one rank, or on ranks whose parts a test combines."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drawloom.components.ports.run import Step
from drawloom.components.ports.tracking import Accumulator, Metric, Value
from support.checkpoints import SingleRankMesh

MESH = SingleRankMesh()
"""The mesh of a single process."""

OPS: Mapping[str, Any] = {"sum": torch.Tensor.sum, "max": torch.Tensor.amax, "min": torch.Tensor.amin}


def combine(accumulators: Mapping[str, Accumulator], parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return totals over ranks with different parts."""
    return {
        name: OPS[accumulator.op](
            torch.stack([part.get(name, accumulator.identity_element()).double() for part in parts]), 0
        )
        for name, accumulator in accumulators.items()
    }


def measure(metric: Metric, *shares: Step) -> Mapping[str, Value]:
    """Return a metric's values for one step; every argument is a rank's share."""
    parts = [metric.measure_on_rank(share) for share in shares]
    return metric.compute(combine(metric.accumulators, parts), shares[0])


def step_of(
    losses: Sequence[float], weights: Sequence[float], sums: Mapping[str, Any] | None = None, **values: Any
) -> Step:
    """Return a step as the last stage's rank sees it: losses, weights and named sums, also tensors, by microbatch."""
    losses_by_microbatch: Any = {
        "loss": torch.tensor(losses, dtype=torch.float64),
        "weight": torch.tensor(weights),
        "sums": {name: torch.tensor(value, dtype=torch.float64) for name, value in (sums or {}).items()},
    }
    return Step(1, 9, {"losses": losses_by_microbatch, **values})


def step_without_loss() -> Step:
    """Return the same step on a rank without the last stage."""
    none = torch.zeros(0, dtype=torch.float64)
    return Step(1, 9, {"losses": {"loss": none, "weight": none, "sums": {}}})
