"""A named sum of the loss: by token, by microbatch, or as it is."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from drawloom.components.metrics.named_sums import losses_of, mean_by_microbatch, total_of, weight_of
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.run import Accumulator, Step, Value
from drawloom.graph import component, setting


@component(impact="safe")
class Mean:
    """
    `of`, a named sum of the loss such as `accuracy` or `z_loss`, divided by how much there was to sum.

    Over all microbatches and replicas. By `token` each counts by its weight, so that the mean does not depend on how
    rows are dealt out; by `microbatch` it is the mean of the microbatches' means; by `step` it is the sum itself.
    """

    mesh: Mesh
    of: str = setting(doc="a named sum of the loss, or 'loss'")
    per: Literal["token", "microbatch", "step"] = setting(default="token", doc="what it is divided by")
    name: str = setting(default="", doc="what it is called in logs; the name of the sum if left out")

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        """What is summed, and how much of it there is; by microbatch, ranks along context have the same."""
        each = Accumulator(of="rows" if self.per == "microbatch" else "data")
        return {"total": each, "count": each}

    def update(self, step: Step) -> Mapping[str, Tensor]:
        """Sum and divisor of this rank's microbatches, 0-dimensional; nothing on ranks without the last stage."""
        if (losses := losses_of(step)) is None:
            return {}
        if self.per == "microbatch":
            means = mean_by_microbatch(losses, self.of, self.mesh)
            return {"total": means.nansum(), "count": (~means.isnan()).sum()}
        return {"total": total_of(losses, self.of), "count": weight_of(losses)}

    def compute(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Value]:
        """The mean; None if it is not finite, or if all weights of the step are 0."""
        total = totals["total"] if self.per == "step" else totals["total"] / totals["count"]
        return {self.name or self.of: float(total) if torch.isfinite(total) and totals["count"] > 0 else None}
