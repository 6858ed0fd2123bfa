"""Refusals of packed completions; `tests/runs/test_rollouts.py` compares gradients."""

from typing import Any

import pytest

from drawloom.graph.project import Recipe
from support.observers_of_runs import TINY

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("model", "words", "problem"),
    [
        ({"use": "model.qwen3.dense"}, [], ""),
        ({"use": "model.qwen3.moe", "router_aux_loss_coef": 0.0, **EXPERTS}, [], ""),
        ({"use": "model.qwen3.moe", **EXPERTS}, [], "a shared beginning would count once"),
        ({"use": "model.qwen3_5"}, [], "[model] has recurrent layers"),
        ({"use": "model.qwen3.dense"}, ["mesh.context=2"], "[shared_prefixes] packs whole rows"),
        ({"use": "model.qwen3.dense"}, ["kernels.attention=eager"], "texts would not see their common"),
        (
            {"use": "model.qwen3.dense"},
            ["kernels.use=kernels.batch_invariant"],
            "texts would not see their common",
        ),
    ],
)
def test_what_can_not_branch_is_refused(model: dict[str, Any], words: list[str], problem: str) -> None:
    """`check` reports recurrent layers, other kernels, a divided row and a loss by row; experts alone are fine."""
    tables: dict[str, Any] = {"vars": {"base": "unused"}, "tokenizer": {"use": "data.bytes"}}
    sizes = {key: value for key, value in TINY.items() if "moe" not in model["use"] or key != "intermediate_size"}
    recipe = Recipe.load("grpo", *words, overlays=["with_shared_prefixes"])
    problems = recipe.with_values(tables | {"model": sizes | model}).graph.problems
    assert any(problem in str(text) for text in problems) if problem else not problems, problems
