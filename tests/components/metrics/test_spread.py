"""How much microbatches differ."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.metrics.spread import Spread
from support.metrics import MESH, measure, step_of, step_without_loss


@given(st.lists(st.lists(st.floats(0.0, 20.0), min_size=1, max_size=5), min_size=1, max_size=4))
def test_quantiles_are_right_to_the_width_of_a_bin(ranks: list[list[float]]) -> None:
    """A quantile over all ranks' microbatches is the least value with enough values up to it."""
    metric = Spread(mesh=MESH, quantiles=(0.0, 0.5, 1.0), bins=200)
    values = measure(metric, step_without_loss(), *(step_of([2 * x for x in one], [2.0] * len(one)) for one in ranks))
    everything = torch.tensor([x for one in ranks for x in one], dtype=torch.float64).sort().values
    assert values["loss_min"] == pytest.approx(float(everything[0]))
    assert values["loss_max"] == pytest.approx(float(everything[-1]))
    for part, name in ((0.0, "loss_p0"), (0.5, "loss_p50"), (1.0, "loss_p100")):
        index = max(0, math.ceil(part * len(everything)) - 1)
        assert values[name] == pytest.approx(float(everything[index]), abs=0.101)


def test_microbatches_without_weight_do_not_count() -> None:
    """Neither as the least nor in the histogram; if none has weight, all values are None."""
    metric = Spread(mesh=MESH, quantiles=(0.5,))
    assert measure(metric, step_of([0.0, 6.0], [0.0, 2.0])) == {
        "loss_min": 3.0,
        "loss_max": 3.0,
        "loss_p50": pytest.approx(3.0, abs=0.01),
    }
    assert measure(metric, step_of([0.0], [0.0])) == {"loss_min": None, "loss_max": None, "loss_p50": None}


def test_an_infinite_loss_has_no_number() -> None:
    """The largest value of a microbatch whose loss overflowed is None, not the largest number of float64."""
    values = measure(Spread(mesh=MESH), step_of([math.inf, 6.0], [2.0, 2.0]))
    assert values == {"loss_min": 3.0, "loss_max": None}
