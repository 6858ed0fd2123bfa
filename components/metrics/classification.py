"""Accuracy, precision, recall and F-beta for classifiers."""

from typing import ClassVar

from drawloom import above, between, component, setting
from drawloom.components.metrics.class_counts import Average, compute_class_scores
from drawloom.components.metrics.named_sums import SummedTensor
from drawloom.ports import MetricTotals, MetricValues, Step


@component(impact="safe")
class Classification(SummedTensor):
    """
    `accuracy`, and `precision`, `recall` and `f1` by class and on average, over all microbatches and replicas.

    The loss must make a named sum by `class_counts.confusion_matrix`; with predictions by
    `class_counts.predict_target_if_in_top_k`, the accuracy is the top-k accuracy. Names of averages are like
    `f1/macro`, names of classes like `f1/0`; with `beta = 2` the F-score is `f2`. Averages ignore classes without
    items.
    """

    size_setting: ClassVar[str] = "classes"

    classes: int = setting("number of classes", check=between(2, 10_001))
    of: str = setting("name of the loss's confusion matrix", default="confusion")
    averages: tuple[Average, ...] = setting("averages to report, or per_class for every class", default=("macro",))
    beta: float = setting("recall's weight relative to precision in the F-score", default=1.0, check=above(0))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the counts."""
        return self.classes, self.classes

    def compute(self, totals: MetricTotals, step: Step) -> MetricValues:
        """Return numbers from 0 to 1, None without items; `sum` is float64 (classes, classes)."""
        return compute_class_scores(totals["sum"], self.averages, self.beta)
