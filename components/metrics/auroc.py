"""Area under the ROC curve for a binary classifier."""

from collections.abc import Mapping

from torch import Tensor

from drawloom.components.metrics.class_counts import compute_auroc
from drawloom.components.metrics.named_sums import read_losses_on_last_stage, sum_tensor_over_microbatches
from drawloom.components.ports.run import Step
from drawloom.components.ports.tracking import Accumulator, Value
from drawloom.graph import between, component, setting


@component(impact="safe")
class Auroc:
    """
    `auroc`, over all microbatches and replicas, exact up to a histogram's bin width.

    The loss must make a named sum by `class_counts.score_histogram` with equally many `bins`.
    """

    bins: int = setting(default=1000, check=between(2, 1_000_001), doc="number of bins in the score histogram")
    of: str = setting(default="score_histogram", doc="name of the loss's score histogram")

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        """Histograms for both labels."""
        return {"histogram": Accumulator(shape=(2, self.bins))}

    def measure_on_rank(self, step: Step) -> Mapping[str, Tensor]:
        """Return this rank's histogram, float64 (2, bins), or {} on ranks without the last stage."""
        losses = read_losses_on_last_stage(step)
        return (
            {}
            if losses is None
            else {"histogram": sum_tensor_over_microbatches(losses, self.of, (2, self.bins), "bins")}
        )

    def compute(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Value]:
        """Return `auroc`, None unless both labels occur; `histogram` is float64 (2, bins)."""
        return {"auroc": compute_auroc(totals["histogram"])}
