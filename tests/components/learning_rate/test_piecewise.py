"""A learning rate in phases."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.learning_rate.piecewise import Piecewise, SchedulePiece
from drawloom.components.ports.run import Step
from drawloom.graph.problems import RecipeError
from drawloom.graph.project import Recipe
from support.steps import values_of


def factors(lr: Piecewise, total: int) -> list[float]:
    """Return the factors by number of steps."""
    return [lr.factor(done, total) for done in range(total + 1)]


def test_warm_up_and_cosine_equal_values_by_hand() -> None:
    """A tenth-step warm-up and a cosine have the values computed on paper."""
    lr = Piecewise(start=0.0, phases=[SchedulePiece(until_percent=20, to=1.0), SchedulePiece(to=0.1, curve="cosine")])
    expected = [0, 0.5, 1, 0.9657, 0.8682, 0.7222, 0.55, 0.3778, 0.2318, 0.1343, 0.1]
    assert factors(lr, 10) == pytest.approx(expected, abs=5e-5)


def test_exponential_is_linear_in_the_logarithm() -> None:
    """All steps in an exponential phase multiply by the same factor; zero is taken as 1e-8."""
    lr = Piecewise(start=0.0, phases=[SchedulePiece(to=1.0, curve="exponential")])
    assert factors(lr, 4) == pytest.approx([1e-8, 1e-6, 1e-4, 1e-2, 1.0])


def test_polynomial_bends_by_its_power() -> None:
    """A polynomial phase follows progress to its power."""
    lr = Piecewise(start=0.0, phases=[SchedulePiece(to=1.0, curve="polynomial", power=3.0)])
    assert factors(lr, 4) == pytest.approx([0, 1 / 64, 8 / 64, 27 / 64, 1])


def test_phases_in_steps_do_not_depend_on_the_total() -> None:
    """A phase of so many steps is as long in a longer run, and its end value holds afterwards."""
    lr = Piecewise(start=1.0, phases=[SchedulePiece(steps=2, to=3.0)])
    assert factors(lr, 4)[:5] == factors(lr, 100)[:5] == [1, 2, 3, 3, 3]


def test_the_first_step_trains_by_default() -> None:
    """The first phase begins with its end value by its number of steps, and not with 0."""
    assert factors(Piecewise(phases=[SchedulePiece(steps=4, to=2.0)]), 4) == [0.5, 0.875, 1.25, 1.625, 2.0]


def test_an_empty_phase_is_a_jump() -> None:
    """A phase without a step sets the value at once."""
    lr = Piecewise(phases=[SchedulePiece(steps=0, to=1.0), SchedulePiece(to=0.0)])
    assert factors(lr, 2) == [1, 0.5, 0]


@given(total=st.integers(1, 500), percent=st.floats(0, 100), low=st.floats(0, 1))
def test_any_number_of_steps_is_valid(total: int, percent: float, low: float) -> None:
    """Percentage and rest fit every run, and stay between their ends."""
    lr = Piecewise(
        start=0.1, phases=[SchedulePiece(until_percent=percent, to=1.0), SchedulePiece(to=low, curve="cosine")]
    )
    assert all(min(low, 0.1) - 1e-9 <= factor <= 1 + 1e-9 for factor in factors(lr, total))


def test_the_phase_leaves_the_factor_of_its_step() -> None:
    """The first step gets the start value: nothing has been done before it."""
    step = Step(1, 10)
    Piecewise(start=0.25, phases=[SchedulePiece(to=1.0)]).run_phase(step)
    assert values_of(step) == {"lr_factor": 0.25}


PIECES = st.lists(
    st.builds(SchedulePiece, steps=st.sampled_from([None, 2, 5]), to=st.sampled_from([0.5, 1.0])),
    min_size=1,
    max_size=3,
)


@given(start=st.sampled_from([0.5, 1.0]), phases=PIECES, total=st.integers(1, 12))
def test_a_rate_that_does_not_depend_on_the_number_of_steps_is_known(
    start: float, phases: list[SchedulePiece], total: int
) -> None:
    """If it says so, each step has the same rate in a longer run; a constant rate, also after a warm-up, says so."""
    lr, node = Piecewise(start=start, phases=phases), SimpleNamespace(settings={"start": start, "phases": phases})
    if not Piecewise.depends_on_total_steps(node):
        assert factors(lr, total) == factors(lr, total + 3)[: total + 1]
    constant = SimpleNamespace(
        settings={"start": 0.0, "phases": [SchedulePiece(steps=9, to=1.0), SchedulePiece(to=1.0)]}
    )
    assert not Piecewise.depends_on_total_steps(constant)


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ("[{ steps = 15, to = 1.0 }]", "phases[0] ends after step 15, and the run has 10"),
        (
            "[{ steps = 5, to = 1.0 }, { until_percent = 40.0, to = 0.1 }]",
            "phases[1] ends after step 4, before it begins: the phases before it take 5",
        ),
        ("[{ until_tokens = 100_000, to = 1.0 }]", "and the run has 10"),
        ("[{ steps = 4, to = 1.0 }, { until_tokens = 1, to = 0.5 }]", "phases[1] ends after step 1, before it begins"),
    ],
)
def test_check_refuses_phases_that_do_not_fit_the_run(phases: str, message: str) -> None:
    """A phase ending after the last step, or before it begins, is a problem naming both steps."""
    sizes = ("lr.batching=@batch", "lr.rows=@packing") if "tokens" in phases else ()
    with pytest.raises(RecipeError) as caught:
        Recipe.load("first_run", "trainer.steps=10", f"lr.phases={phases}", *sizes).check()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "phases",
    [
        "[{ steps = 10, to = 1.0 }]",
        "[{ steps = 4, to = 1.0 }, { until_percent = 40.0, to = 0.5 }, { to = 0.1 }]",
        "[{ steps = 0, to = 1.0 }, { until_percent = 1.0, to = 0.5 }, { until_percent = 100.0, to = 0.1 }]",
    ],
)
def test_check_accepts_phases_without_a_step_and_up_to_the_last(phases: str) -> None:
    """A phase may end where it begins, as a jump or by rounding, and with the last step."""
    assert not Recipe.load("first_run", "trainer.steps=10", f"lr.phases={phases}").check()


def test_check_leaves_phases_in_tokens_of_a_growing_batch_to_the_run() -> None:
    """With a ramp the settings do not determine the step for a number of tokens, so nothing is refused."""
    words = ("lr.phases=[{ until_tokens = 100_000, to = 1.0 }]", "lr.batching=@batch", "lr.rows=@packing")
    ramp = "batch.ramp=[{ size = 32, until_step = 2 }]"
    assert not Recipe.load("first_run", "trainer.steps=10", *words, ramp).check()
