"""Options for the costs of stages."""

from pathlib import Path

import pytest

from drawloom import Recipe
from drawloom.components.commands.planning.schedule import (
    choose_cost_settings_of_schedule,
    make_cost_source,
    parse_costs,
)
from drawloom.components.pipeline.program.timing import Costs
from drawloom.components.planning.cost_sources import PlannedCosts, UnitCosts
from support.plans import RECIPE


def test_costs_are_numbers_a_plan_or_a_folder(tmp_path: Path) -> None:
    """Anything else is refused with an example."""
    assert parse_costs("F=2,comm=0.5") == {"forward": 2.0, "comm": 0.5}
    assert (parse_costs("plan"), parse_costs(str(tmp_path))) == ("plan", tmp_path)
    with pytest.raises(ValueError, match="or a run folder"):
        parse_costs("nowhere")


def test_schedules_get_the_costs_they_have_settings_for() -> None:
    """
    `auto` gets all costs, schedules in a V get a message's time relative to a stage's forward, others get nothing.
    """
    units = UnitCosts(Costs(2, 3, 4, comm=0.5))
    auto = {"slices", "forward", "comm"}
    assert choose_cost_settings_of_schedule(auto, units, 4) == {
        "forward": 2,
        "backward_input": 3,
        "backward_weight": 4,
        "comm": 0.5,
    }
    assert choose_cost_settings_of_schedule({"comm"}, units, 4) == {"comm": 0.5}
    assert choose_cost_settings_of_schedule({"stages_per_rank"}, units, 4) == {}


def test_a_model_has_a_slice_for_each_layer() -> None:
    """The settings also have each stage's other costs, and activations in bytes."""
    for layers in (2, 3):
        recipe: Recipe = RECIPE.with_values({"model": {"num_hidden_layers": layers}})
        planned = make_cost_source("plan", "h100", recipe.project, recipe)
        assert isinstance(planned, PlannedCosts)
        settings = choose_cost_settings_of_schedule({"slices"}, planned, 2)
        assert len(settings["slices"]) == len(settings["activations"]) == layers and len(settings["per_stage"]) == 4
