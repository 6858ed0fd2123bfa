"""How full rows are."""

from drawloom.components.metrics.fill_rate import FillRate
from drawloom.components.ports.data import PackedDataset
from drawloom.components.ports.run import Step
from drawloom.graph.testing import fake


def test_the_rate_covers_training_rows() -> None:
    """The value is the data set's for its training split."""
    rows = fake(PackedDataset, fill_rate=lambda split: {"train": 0.75, "validation": 0.5}[split])
    assert FillRate(rows=rows).compute({}, Step(1, 1)) == {"fill_rate": 0.75}
