"""Recipe look-ups shared by several commands."""

import pytest

from drawloom import Recipe
from drawloom.components.commands._recipes import (
    Pipeline,
    count_microbatches_per_replica,
    find_only_node,
    require_microbatches,
)
from drawloom.components.ports.pipeline import Schedule
from drawloom.components.ports.run import Phase
from drawloom.graph import UserError


def test_a_recipe_has_a_pipeline() -> None:
    """Its schedule, its ranks, and the microbatches of one replica."""
    pipeline = Pipeline.from_recipe(Recipe.load("pipeline", "mesh.data_replicate=2"))
    assert (pipeline.use, pipeline.ranks, pipeline.microbatches) == ("pipeline.schedules.one_f_one_b", 2, 4)


def test_a_missing_node_is_reported() -> None:
    """The command reports what is missing instead of guessing."""
    graph = Recipe.load("first_run").graph
    assert count_microbatches_per_replica(graph) is not None
    assert find_only_node(graph, Schedule) == "schedule"
    with pytest.raises(
        UserError, match=r"nodes that implement Phase \(\[.*\]\); exactly one is required: Part of every step\."
    ):
        find_only_node(graph, Phase)
    with pytest.raises(UserError, match="number of microbatches is unknown"):
        require_microbatches(None)
