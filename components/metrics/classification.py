"""Accuracy, precision, recall and F-beta of a loss that classifies."""

from collections.abc import Mapping

from torch import Tensor

from drawloom.components.metrics.class_counts import Average, scores
from drawloom.components.metrics.named_sums import losses_of, tensor_sum
from drawloom.components.ports.run import Accumulator, Step, Value
from drawloom.graph import above, between, component, setting


@component(impact="safe")
class Classification:
    """
    `accuracy`, and `precision`, `recall` and `f1` by class and on average, over all microbatches and replicas.

    Of a named sum that the loss makes by `class_counts.confusion_matrix`; with predictions by
    `class_counts.top_k_predictions`, the accuracy is top-k accuracy. Averages are called `f1/macro`, say, and classes
    by their numbers, `f1/0`; a class that is the target of no item has no values and is in no average. With another
    `beta` the F-score is `f2`, say.
    """

    classes: int = setting(check=between(2, 10_001), doc="how many classes there are")
    of: str = setting(default="confusion", doc="the named sum of the loss that is a confusion matrix")
    averages: tuple[Average, ...] = setting(default=("macro",), doc="what to write down: averages, or each class")
    beta: float = setting(default=1.0, check=above(0), doc="weight of recall relative to precision in the F-score")

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        """The confusion matrix."""
        return {"confusion": Accumulator(shape=(self.classes, self.classes))}

    def update(self, step: Step) -> Mapping[str, Tensor]:
        """That of this rank's microbatches, float64 (classes, classes); nothing on ranks without the last stage."""
        losses = losses_of(step)
        shape = (self.classes, self.classes)
        return {} if losses is None else {"confusion": tensor_sum(losses, self.of, shape, "classes")}

    def compute(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Value]:
        """Numbers from 0 to 1; None where there is no item. `confusion` is float64 (classes, classes)."""
        return scores(totals["confusion"], self.averages, self.beta)
