"""Several metrics as one."""

from drawloom.components.metrics.group import MetricGroup
from drawloom.components.metrics.mean import Mean
from drawloom.components.metrics.spread import Spread
from drawloom.components.ports.tracking import Metric
from support.metrics import MESH, measure, step_of


def test_members_keep_their_totals_apart() -> None:
    """Means over different sums, under a prefix, equal the members' own."""
    steps = [step_of([8.0, 3.0], [4.0, 1.0], {"hits": [2.0, 1.0]}), step_of([1.0], [5.0], {"hits": [5.0]})]
    members: list[Metric] = [Mean(mesh=MESH, of="hits"), Mean(mesh=MESH, of="loss"), Spread(mesh=MESH)]
    alone = {name: value for member in members for name, value in measure(member, *steps).items()}
    values = measure(MetricGroup(members=[*members], prefix="train/"), *steps)
    assert values == {f"train/{name}": value for name, value in alone.items()}
