"""Budgets of tokens and time."""

from typing import Any

import pytest
import torch

from drawloom.components.phases.budget import Budget
from drawloom.components.ports.run import Step
from drawloom.graph import RecipeError
from drawloom.graph.project import Recipe


def run(phase: Budget, *counts: int, first: int = 1) -> int:
    """Run steps with these counts of tokens, and return the last step of the run, or 0."""
    for index, count in enumerate(counts, first):
        step = Step(index, 99, {"tokens": torch.tensor(float(count))}, started=0.0)
        phase.run_phase(step)
        if step.is_last:
            return index
    return 0


def test_a_run_ends_with_the_step_that_uses_its_tokens_up(one_rank: Any) -> None:
    """A resumed run does not end a step later either; a larger budget lets the ended run go on."""
    counts = [100, 100, 50, 50, 100]
    assert run(Budget(mesh=one_rank, tokens=300), *counts) == 4
    first = Budget(mesh=one_rank, tokens=300)
    assert run(first, *counts[:3]) == 0
    resumed = Budget(mesh=one_rank, tokens=300)
    resumed.load_state_dict(first.state_dict())
    assert run(resumed, *counts[3:], first=4) == 4
    assert resumed.stop_reason() == "the budget of 300 tokens is used up"
    larger = Budget(mesh=one_rank, tokens=301)
    larger.load_state_dict(resumed.state_dict())
    assert larger.stop_reason() == ""


def test_time_counts_over_all_processes_of_a_run(one_rank: Any) -> None:
    """A process counts from its first step on; time between processes does not count."""
    times = iter([50.0, 100.0, 30.0, 80.0])
    first, second = Budget(mesh=one_rank, minutes=3), Budget(mesh=one_rank, minutes=3)
    first.clock = second.clock = lambda: next(times)
    assert run(first, 1, 1) == 0 and first.state_dict() == {"tokens": 0, "seconds": 100.0}
    second.load_state_dict(first.state_dict())
    assert run(second, 1, 1, first=3) == 4
    assert second.stop_reason() == "the budget of 3 minutes is used up"


def test_a_budget_without_a_limit_is_a_problem() -> None:
    """It would never end a run."""
    values = {"budget": {"use": "phases.budget"}, "edit": {"trainer": {"phases": {"before": {"@report": "@budget"}}}}}
    with pytest.raises(RecipeError, match="the budget has no limit"):
        Recipe.load("first_run").with_values(values).check(skip_machine_checks=True)
