"""Loss per text byte, which does not depend on the tokenizer."""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from drawloom import component, internal, setting
from drawloom.components.metrics.named_sums import read_losses_on_last_stage, sum_scalar_over_microbatches
from drawloom.ports import Accumulator, MetricTotals, MetricValues, Step, Tokenizer, count_target_bytes


@component(impact="safe")
class BitsPerByte:
    """
    `bits_per_byte`: the cross entropy over all targets in bits, divided by their text's bytes.

    The batch's token weights apply to both. A document's end token has a loss but no bytes.
    """

    batch_leaves: ClassVar[tuple[str, ...]] = ("targets", "weights")

    tokenizer: Tokenizer
    of: str = setting("name of the loss's cross entropy sum, in nats", default="cross_entropy")

    accumulators: ClassVar[Mapping[str, Accumulator]] = {"nats": Accumulator(), "bytes": Accumulator(scope="rows")}
    _table: Tensor = internal(None)

    def open(self) -> None:
        """Load the byte counts by token id."""
        self._table = torch.from_numpy(self.tokenizer.token_byte_counts()).double()

    def measure_on_rank(self, step: Step) -> MetricTotals:
        """Return nats and bytes for this rank's microbatches, 0-dimensional, or {} on ranks without the last stage."""
        if (losses := read_losses_on_last_stage(step)) is None:
            return {}
        # batches are on the CPU, so that nothing waits for a device
        counts = [count_target_bytes(batch.targets, batch.weights, self._table) for batch in step.state["batches"]]
        return {
            "nats": sum_scalar_over_microbatches(losses, self.of),
            "bytes": sum(counts, torch.zeros((), dtype=torch.float64)),
        }

    def compute(self, totals: MetricTotals, step: Step) -> MetricValues:
        """Return the value, None if targets have no bytes or the loss is not finite."""
        value = float(totals["nats"] / totals["bytes"]) / math.log(2)
        return {"bits_per_byte": value if math.isfinite(value) else None}
