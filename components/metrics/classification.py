"""Accuracy, precision, recall and F-beta for classifiers."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from drawloom import above, between, component, setting
from drawloom.components.metrics.class_counts import Average, compute_class_scores
from drawloom.components.metrics.named_sums import SummedTensor
from drawloom.ports import Step, Value


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

    classes: int = setting(check=between(2, 10_001), doc="number of classes")
    of: str = setting(default="confusion", doc="name of the loss's confusion matrix")
    averages: tuple[Average, ...] = setting(default=("macro",), doc="averages to report, or per_class for every class")
    beta: float = setting(default=1.0, check=above(0), doc="recall's weight relative to precision in the F-score")

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the counts."""
        return self.classes, self.classes

    def compute(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Value]:
        """Return numbers from 0 to 1, None without items; `sum` is float64 (classes, classes)."""
        return compute_class_scores(totals["sum"], self.averages, self.beta)
