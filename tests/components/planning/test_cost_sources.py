"""Where costs come from."""

import numpy as np
import pytest

from drawloom.components.distributed.device_model import device_model
from drawloom.components.pipeline.program.notation import read_program
from drawloom.components.pipeline.program.timing import Costs, CostTable
from drawloom.components.planning.cost_sources import Planned, Traced, Units, slices_of
from drawloom.components.planning.traces import Measured
from drawloom.graph import UserError
from support.plans import RECIPE
from support.schedules import schedule


def test_a_plan_costs_as_much_in_other_stages() -> None:
    """One stage on a rank or two: the forward passes of all stages take as long, and more live at once in GPipe."""
    planned = Planned(RECIPE.with_values({"model": {"num_hidden_layers": 4}}), device_model("cpu"))
    one, two = (planned.costs(2, stages) for stages in (1, 2))
    assert isinstance(one, CostTable)
    assert isinstance(two, CostTable)
    assert (one.lengths.shape, two.lengths.shape) == ((2, 4), (4, 4))
    assert two.lengths.sum(0) == pytest.approx(one.lengths.sum(0), rel=0.03)
    first, all_at_once = (planned.memory(schedule(name).program(2, 4)) for name in ("one_f_one_b", "gpipe"))
    assert all_at_once[1] > 2 * first[1]
    with pytest.raises(UserError, match="4 layers can't be cut into 6 stages"):
        planned.costs(3, 2)


def test_a_trace_gives_costs_for_any_stages() -> None:
    """Those of its own stages, and shares of them."""
    program = read_program("0: 0F0 0B0\n1: 1F0 1B0\n")
    times = np.array([0.0, 6, 1, 3])
    traced = Traced(Measured(program, times, times + np.array([1, 2, 2, 3])))
    costs = traced.costs(2, 1)
    assert isinstance(costs, CostTable)
    assert costs.lengths[:, 0].tolist() == [1, 2]
    assert [traced.costs(2, 2).length("B", stage) for stage in range(4)] == [1, 1, 1.5, 1.5]


def test_units_are_those_of_a_rank() -> None:
    """Stages share them."""
    assert Units(Costs(comm=1)).costs(4, 2) == Costs(0.5, 0.5, 0.5, comm=1)


def test_slices_add_up_to_the_costs() -> None:
    """Settings of auto: a slice of mean cost takes the mean seconds."""
    found = slices_of(CostTable(comm=0.5, lengths=np.array([[1.0, 0, 1, 1], [3, 0, 1, 2]])))
    assert found == {
        "forward": 2.0, "backward_input": 1.0, "backward_weight": 1.5, "comm": 0.5, "slices": [0.6667, 1.3333],
    }  # fmt: skip
