"""Skipped steps, and their remedies."""

import pytest
import torch

from drawloom.components.run.skipped_steps import SkippedSteps
from drawloom.graph import UserError
from support.steps import make_skipped_step


@pytest.mark.parametrize(("weight", "remedy"), [(0.0, "raise the length of rows"), (2.0, "lower the learning rate")])
@pytest.mark.parametrize("limit", [1, 2])
def test_the_remedy_is_for_the_reason(weight: float, remedy: str, limit: int) -> None:
    """Steps without a token to learn from need longer rows or more of them, and no other learning rate."""
    skipped = SkippedSteps(limit)
    step = make_skipped_step(1, 1, state={"loss_weight": torch.tensor(weight)})
    with pytest.raises(UserError, match=remedy):
        skipped.add_completed_step(step)
        skipped.fail_if_last_step_skipped()
