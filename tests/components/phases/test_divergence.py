"""The end of diverged runs."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.phases.divergence import Divergence
from drawloom.components.ports.run import Step
from drawloom.components.state.step_state import StepState
from drawloom.graph import UserError
from support.steps import LateState

NAN, INF = math.nan, math.inf
Pair = tuple[float, float]


def train(phase: Divergence, *pairs: Pair, first: int = 1, total: int = 99, late: bool = False) -> int:
    """Run steps with these losses and norms, and return the last step accepted by the phase."""
    for index, (loss, norm) in enumerate(pairs, first):
        values = {"loss": torch.tensor(loss), "grad_norm": torch.tensor(norm)}
        step = Step(index, total, (LateState if late else StepState)(values))
        phase.run_phase(step)
    return index


LOST: dict[str, Pair] = {
    "far above": (17.0, 1.0),
    "no gradients": (5.5, 0.0),
    "not finite": (NAN, NAN),
    "inf": (3.0, INF),
}


@pytest.mark.parametrize("kind", LOST)
def test_a_run_ends_after_lost_steps_in_a_row(kind: str) -> None:
    """Any kind of lost step counts, also mixed with others; one good step begins the count anew."""
    phase = Divergence(steps=3)
    assert train(phase, (5.5, 1.0), LOST[kind], LOST["far above"], (16.4, 1.0), LOST[kind], LOST["not finite"]) == 6
    with pytest.raises(UserError, match=r"has diverged: since step 5 the loss was above 16\.5, .* began at 5\.5, and"):
        train(phase, LOST[kind], first=7)


def test_the_message_gives_remedies() -> None:
    """It names the loss and the norm, the remedies, and which checkpoints to remove."""
    with pytest.raises(UserError) as failure:
        train(Divergence(steps=2), (5.5, 1.0), (8.0, 1.0), (70.0, 30.0), (80.0, 40.0))
    text = str(failure.value)
    assert "is 80 at step 4 with a gradient norm of 40" in text and "lower the learning rate" in text
    assert "remove the checkpoints after step 2 and start" in text


def test_a_run_without_a_finite_loss_ends() -> None:
    """The run also ends if its first step has no loss to compare with."""
    with pytest.raises(UserError, match=r"since step 1 .* the loss was never finite, and is nan at step 3"):
        train(Divergence(steps=3), *[LOST["not finite"]] * 3)


@pytest.mark.parametrize("nothing", [(NAN, 0.0), (0.0, 0.0)])
def test_a_step_with_nothing_to_learn_does_not_count_as_lost(nothing: Pair) -> None:
    """Without a token, or with equal rewards, its gradients are 0; neither does it end a row of lost steps."""
    phase = Divergence(steps=2)
    assert train(phase, (5.5, 1.0), *[nothing] * 5, LOST["far above"], nothing) == 8
    with pytest.raises(UserError, match="has diverged"):
        train(phase, LOST["far above"], first=9)


@given(
    st.floats(0.1, 12.0),
    st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(1e-6, 1e4)), min_size=30, max_size=60),
)
def test_losses_up_to_twice_the_first_never_end_a_run(first: float, steps: list[Pair]) -> None:
    """Neither do large gradients, nor ten times a small first loss."""
    peak = max(2 * first, 3.0)
    assert train(Divergence(), (first, 1.0), *((peak * share, norm) for share, norm in steps)) == len(steps) + 1


@pytest.mark.parametrize("late", [False, True])
def test_a_late_step_is_judged_before_the_next_changes_weights(late: bool) -> None:
    """If a device computes the loss, the host reads it one step later, and at once for a run's last step."""
    phase = Divergence(steps=2)
    pairs = [(5.5, 1.0), LOST["not finite"], LOST["not finite"]]
    if late:
        assert train(phase, *pairs, late=True) == 3
    with pytest.raises(UserError, match=r"since step 2 .* at step 3"):
        train(phase, (5.5, 1.0), first=4, late=True) if late else train(phase, *pairs)
    with pytest.raises(UserError, match="at step 3"):
        train(Divergence(steps=2), *pairs, total=3, late=late)


@pytest.mark.parametrize("late", [False, True])
def test_a_resumed_run_counts_on(late: bool) -> None:
    """The state has the first loss and the lost steps, also a late step's; repeated steps do not count."""
    phase: Any = Divergence(steps=3)
    train(phase, (5.5, 1.0), LOST["far above"], LOST["far above"], late=late)
    state = phase.state_dict()
    assert state == {"first": 5.5, "lost": 2}
    phase = Divergence(steps=3)
    phase.load_state_dict(state)
    phase.run_phase(Step(4, 9, {"loss": torch.tensor(99.0), "grad_norm": torch.tensor(1.0)}, goes_back=True))
    assert phase.state_dict() == state
    with pytest.raises(UserError, match="since step 2"):
        train(phase, LOST["far above"], first=4, total=4, late=late)
