"""Schedules by name, against transformers' schedules."""

from typing import Any

import pytest
import torch

from drawloom.components.learning_rate.warmup import AfterWarmup
from drawloom.graph.problems import RecipeError
from drawloom.graph.project import Recipe
from drawloom.graph.testing import build

THEIRS: dict[str, Any] = {
    "constant": lambda theirs, *words: theirs.get_constant_schedule_with_warmup(*words),
    "linear": lambda theirs, *words: theirs.get_linear_schedule_with_warmup(*words, 20),
    "cosine": lambda theirs, *words: theirs.get_cosine_schedule_with_warmup(*words, 20),
    "inverse_sqrt": lambda theirs, *words: theirs.get_inverse_sqrt_schedule(*words),
    "wsd": lambda theirs, *words: theirs.get_wsd_schedule(*words, 5, 20, decay_type="linear"),
}


def schedule(name: str, **settings: Any) -> AfterWarmup:
    """Return the component of a name."""
    made: AfterWarmup = build(f"learning_rate.{name}", **settings)
    return made


def factors(lr: AfterWarmup, total: int) -> list[float]:
    """Return the factors by step."""
    return [lr.factor(done, total) for done in range(total)]


@pytest.mark.parametrize("name", THEIRS)
def test_factors_equal_those_of_transformers(name: str) -> None:
    """
    They agree step by step, for a warm-up of 4 steps, with and without a decay of 5, and for percentages.

    By default the warm-up begins with a quarter instead of 0, so that the first step trains.
    """
    from transformers import optimization  # takes seconds

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    theirs = THEIRS[name](optimization, optimizer, 4)
    expected = [theirs.lr_lambdas[0](done) for done in range(20)]
    for given in ({"warmup_steps": 4, "decay_steps": 5}, {"warmup_percent": 20.0, "decay_percent": 25.0}):
        settings = {key: value for key, value in given.items() if name == "wsd" or key.startswith("warmup")}
        assert factors(schedule(name, start=0.0, **settings), 20) == pytest.approx(expected)
        after = factors(schedule(name, **settings), 20)
        assert after[:4] == [0.25, 0.4375, 0.625, 0.8125] and after[4:] == pytest.approx(expected[4:])


@pytest.mark.parametrize("name", THEIRS)
def test_warm_up_is_off_by_default(name: str) -> None:
    """The first step has the base learning rate, and no step divides by zero, also in a run of one."""
    assert schedule(name).factor(0, 1) == 1.0
    assert all(0 <= factor <= 1 for factor in factors(schedule(name, warmup_steps=9), 3))


def test_ends_are_reached_and_kept() -> None:
    """After the last step the factor is `end`, however many steps follow; a warm-up begins with `start`."""
    kinds: dict[str, dict[str, Any]] = {"linear": {}, "cosine": {}, "wsd": {"decay_percent": 50.0, "curve": "cosine"}}
    for name, more in kinds.items():
        lr = schedule(name, start=0.5, warmup_steps=2, end=0.1, **more)
        assert [lr.factor(done, 10) for done in (0, 1, 2)] == [0.5, 0.75, 1.0]
        assert lr.factor(10, 10) == lr.factor(11, 10) == pytest.approx(0.1)


def test_a_decay_longer_than_the_rest_is_shortened_to_it() -> None:
    """It begins after the warm-up, and reaches `end` at the last step."""
    assert factors(schedule("wsd", warmup_steps=1, decay_steps=9), 5) == pytest.approx([1, 1, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("what", ["warmup", "decay"])
def test_steps_and_percent_together_are_refused(what: str) -> None:
    """One of them would be ignored."""
    words = ("lr.use=learning_rate.wsd", f"lr.{what}_steps=3", f"lr.{what}_percent=2.0")
    with pytest.raises(RecipeError, match=f"both {what}_steps and {what}_percent are given"):
        Recipe.load("first_run", *words).check()


@pytest.mark.parametrize(
    ("words", "safe"),
    [
        (("lr.use=learning_rate.constant", "lr.warmup_steps=3"), True),
        (("lr.use=learning_rate.inverse_sqrt", "lr.warmup_steps=3"), True),
        (("lr.use=learning_rate.constant", "lr.warmup_percent=3.0"), False),
        (("lr.use=learning_rate.cosine",), False),
    ],
)
def test_more_steps_are_safe_where_no_factor_follows_from_their_number(words: tuple[str, ...], safe: bool) -> None:
    """A resumed run may have more steps then, without being asked."""
    before, after = (Recipe.load("first_run", *words, f"trainer.steps={steps}") for steps in (240, 300))
    changes = after.changes_since(before)
    assert [change.impact for change in changes] == (["safe"] if safe else ["changes_training"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("lr.use=learning_rate.cosine", "lr.warmup_steps=15"), "the warm-up takes 15 steps, and the run has 10"),
        (
            ("lr.use=learning_rate.wsd", "lr.warmup_steps=6", "lr.decay_steps=5"),
            "the warm-up takes 6 steps and the decay 5, and the run has 10",
        ),
        (
            ("lr.use=learning_rate.linear", "lr.warmup_tokens=10_000_000", "lr.batching=@batch", "lr.rows=@packing"),
            "and the run has 10; make it shorter, for example warmup_percent = 10.0",
        ),
    ],
)
def test_check_refuses_a_warm_up_or_decay_that_the_run_has_no_steps_for(words: tuple[str, ...], message: str) -> None:
    """The learning rate would never reach its base value, or its end value."""
    with pytest.raises(RecipeError) as caught:
        Recipe.load("first_run", "trainer.steps=10", *words).check()
    assert message in str(caught.value)


def test_check_accepts_a_warm_up_and_a_decay_that_fill_the_run() -> None:
    """Six and four steps of ten, also as percentages."""
    for words in (("lr.warmup_steps=6", "lr.decay_steps=4"), ("lr.warmup_percent=60.0", "lr.decay_percent=40.0")):
        assert not Recipe.load("first_run", "trainer.steps=10", "lr.use=learning_rate.wsd", *words).check()
