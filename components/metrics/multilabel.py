"""Accuracy, precision, recall and F-beta for multi-label classifiers."""

from typing import ClassVar

from drawloom import above, between, component, setting
from drawloom.components.metrics.class_counts import Average, compute_label_scores
from drawloom.components.metrics.named_sums import SummedTensor
from drawloom.ports import MetricTotals, MetricValues, Step


@component(impact="safe")
class Multilabel(SummedTensor):
    """
    `label_accuracy`, and `precision`, `recall` and `f1` by label and on average, over all microbatches and replicas.

    The loss must make a named sum by `class_counts.count_confusion_by_label`. Names are as in `metrics.classification`;
    to use both, put one into a `metrics.group` with a prefix. The accuracy is the fraction of right decisions over all
    items and labels. Averages except "micro" ignore labels without items.
    """

    size_setting: ClassVar[str] = "labels"

    labels: int = setting("number of labels", check=between(1, 1_000_001))
    of: str = setting("name of the loss's sum with one confusion matrix per label", default="labels")
    averages: tuple[Average, ...] = setting(
        "averages to report, or per_class for every label", default=("micro", "macro")
    )
    beta: float = setting("recall's weight relative to precision in the F-score", default=1.0, check=above(0))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the counts."""
        return self.labels, 2, 2

    def compute(self, totals: MetricTotals, step: Step) -> MetricValues:
        """Return numbers from 0 to 1, None without items; `sum` is float64 (labels, 2, 2)."""
        return compute_label_scores(totals["sum"], self.averages, self.beta)
