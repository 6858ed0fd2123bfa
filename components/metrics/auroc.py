"""Area under the ROC curve for a binary classifier."""

from typing import ClassVar

from drawloom import between, component, setting
from drawloom.components.metrics.class_counts import compute_auroc
from drawloom.components.metrics.named_sums import SummedTensor
from drawloom.ports import MetricTotals, MetricValues, Step


@component(impact="safe")
class Auroc(SummedTensor):
    """
    `auroc`, over all microbatches and replicas, exact up to a histogram's bin width.

    The loss must make a named sum by `class_counts.score_histogram` with equally many `bins`.
    """

    size_setting: ClassVar[str] = "bins"

    bins: int = setting("number of bins in the score histogram", default=1000, check=between(2, 1_000_001))
    of: str = setting("name of the loss's score histogram", default="score_histogram")

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the counts."""
        return 2, self.bins

    def compute(self, totals: MetricTotals, step: Step) -> MetricValues:
        """Return `auroc`, None unless both labels occur; `sum` is float64 (2, bins)."""
        return {"auroc": compute_auroc(totals["sum"])}
