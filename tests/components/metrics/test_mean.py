"""Named sums of the loss as means."""

from typing import Any

import pytest

from drawloom.components.metrics.mean import Mean
from drawloom.graph import UserError
from support.metrics import MESH, measure, step_of, step_without_loss

FIRST = step_of([8.0, 3.0], [4.0, 1.0], {"hits": [2.0, 1.0]})
SECOND = step_of([1.0, 0.0], [5.0, 0.0], {"hits": [5.0, 0.0]})


@pytest.mark.parametrize(("per", "value"), [("token", 0.8), ("microbatch", (0.5 + 1 + 1) / 3), ("step", 8.0)])
def test_means_over_replicas_and_stages_cover_the_whole_step(per: Any, value: float) -> None:
    """Two ranks with two microbatches apiece agree with one rank with all, also beside stages without a loss."""
    metric = Mean(mesh=MESH, of="hits", per=per)
    whole = step_of([8.0, 3.0, 1.0, 0.0], [4.0, 1.0, 5.0, 0.0], {"hits": [2.0, 1.0, 5.0, 0.0]})
    for steps in ([whole], [FIRST, SECOND], [FIRST, step_without_loss(), SECOND, step_without_loss()]):
        assert measure(metric, *steps) == {"hits": pytest.approx(value)}


def test_the_loss_itself_has_a_mean_under_another_name() -> None:
    """`loss` is a sum like others."""
    assert measure(Mean(mesh=MESH, of="loss", name="again"), FIRST) == {"again": pytest.approx(11 / 5)}


def test_a_step_without_weight_has_no_mean() -> None:
    """None, and neither zero nor NaN."""
    assert measure(Mean(mesh=MESH, of="loss"), step_of([0.0], [0.0])) == {"loss": None}


def test_a_tensor_of_counts_has_no_mean() -> None:
    """The error names its shape."""
    with pytest.raises(UserError, match=r"'counts' is a tensor of shape \(2,\), and the metric needs a number"):
        Mean(mesh=MESH, of="counts").measure_on_rank(step_of([1.0], [1.0], {"counts": [[1.0, 2.0]]}))


def test_an_unknown_sum_is_refused() -> None:
    """The message lists the loss's sums."""
    with pytest.raises(UserError, match=r"no sum called 'hit', .*; write one of loss, hits"):
        Mean(mesh=MESH, of="hit").measure_on_rank(FIRST)
