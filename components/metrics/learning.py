"""Training progress, from the values that phases write to a step."""

from drawloom import component
from drawloom.ports import Metric, MetricTotals, MetricValues, Step, Value

NAMES = ("loss", "grad_norm", "lr", "validation_loss", "validation_reward")


@component(impact="safe")
class Learning(Metric):
    """`loss`, `grad_norm`, `lr`, `validation_loss` and `validation_reward`, if the step has them."""

    def compute(self, totals: MetricTotals, step: Step) -> MetricValues:
        """Return the values; a skipped step has `skipped` and no loss."""
        values: dict[str, Value] = {name: step.state.number(name) for name in NAMES if name in step.state}
        return {"loss": None, **values} | {"loss": None, "skipped": True} if step.skip_reason else values
