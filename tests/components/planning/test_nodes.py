"""Nodes of a recipe, as a plan sees them."""

from typing import Any

from drawloom.components.distributed.planned import PlannedMesh
from drawloom.components.planning.nodes import Nodes
from drawloom.components.ports.rollouts import PolicyBatch
from drawloom.graph.project import Recipe
from support.observers_of_runs import TINY


def test_a_plan_of_rollouts_has_all_completions_of_a_microbatch() -> None:
    """Rows are completions, as long as the longest prompt and the longest completion together."""
    tables: dict[str, Any] = {
        "vars": {"base": "unused", "length": 9},
        "tokenizer": {"use": "data.bytes"},
        "model": {"use": "model.qwen3.dense", **TINY},
        "batch": {"global_size": 8, "micro_size": 2},
        "rollout": {"group_size": 5},
        "rollouts": {"max_tokens": 4},
    }
    nodes = Nodes.from_recipe(Recipe.load("grpo").with_values(tables))
    assert nodes.batch_type is PolicyBatch and nodes.sequence_length == 13
    assert nodes.count_rows_and_microbatches(PlannedMesh.from_settings({}, 1)) == (10, 4)
