"""Refusals of replayed routes; `tests/runs/test_replayed_routes.py` runs them."""

from typing import Any

import pytest

from drawloom.graph.project import Recipe
from support.observers_of_runs import TINY

DENSE: dict[str, Any] = {"use": "model.qwen3.dense", **TINY}
SIZES = {key: value for key, value in TINY.items() if key != "intermediate_size"}
EXPERTS = {"use": "model.qwen3.moe", **SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("tables", "problem"),
    [
        ({}, ""),
        ({"model": DENSE}, "[model] has no experts to choose"),
        ({"rollouts": {"use": "rollouts.server", "max_tokens": 4}, "rollout": {"lag": 1, "epochs": 2}}, ""),
        ({"rollout": {"lag": 1}}, "[metrics.replayed_routes] keeps the routes of one step's rollout"),
        ({"rollouts": {"exact": True}}, "exact rollouts have the routes of the learning pass"),
        ({"rollout": {"epochs": 2}}, "[metrics.replayed_routes] keeps the routes of one step's rollout"),
        ({"rollout": {"minibatches": 2}}, "[metrics.replayed_routes] keeps the routes of one step's rollout"),
        ({"capture": {"use": "pipeline.captured"}}, "CUDA graphs repeat a pass without its routers' choices"),
        ({"compile": {"use": "stages.compiled"}}, "compiled layers do not call the replay"),
    ],
)
def test_routes_that_can_not_be_replayed_are_refused(tables: dict[str, Any], problem: str) -> None:
    """`check` reports samplers without routes, features around the routers, and rollouts for several steps."""
    common: dict[str, Any] = {"vars": {"base": "unused"}, "tokenizer": {"use": "data.bytes"}, "model": EXPERTS}
    recipe = Recipe.load("grpo", overlays=["with_replayed_routes"]).with_values(common | tables)
    problems = recipe.graph.problems
    assert any(problem in str(text) for text in problems) if problem else not problems, problems
