"""Lengths in tokens."""

from typing import Any

import pytest

from drawloom.components.ports.data import PackedDataset
from drawloom.components.run.batch import GlobalBatch, RampStage
from drawloom.graph.problems import RecipeError
from drawloom.graph.project import Recipe
from drawloom.graph.testing import build, fake
from support.checkpoints import SingleRankMesh

LENGTH, TOTAL = 8, 30


def sizes() -> dict[str, Any]:
    """Return steps with 2 rows, 4 after the fifth, 8 after the ninth."""
    ramp = [RampStage(size=2, until_step=5), RampStage(size=4, until_step=9)]
    batching = GlobalBatch(mesh=SingleRankMesh(), global_size=8, micro_size=2, ramp=ramp)
    return {"batching": batching, "rows": fake(PackedDataset, length=LENGTH)}


def tokens_of(step: int) -> int:
    """Return the tokens of a step."""
    return LENGTH * (2 if step <= 5 else 4 if step <= 9 else 8)


def factors(lr: Any) -> list[float]:
    """Return the factors by step."""
    return [lr.factor(done, TOTAL) for done in range(TOTAL)]


@pytest.mark.parametrize("tokens", [0, 1, 16, 17, 80, 81, 300, 1000])
def test_a_length_in_tokens_covers_the_steps_with_these_tokens(tokens: int) -> None:
    """
    With a batch ramp, the warm-up ends with the step that reaches its tokens; the decay takes the fewest last steps
    with its tokens, whatever their sizes.
    """
    up = next(count for count in range(TOTAL + 1) if sum(map(tokens_of, range(1, count + 1))) >= tokens)
    down = next(n for n in range(TOTAL + 1) if sum(map(tokens_of, range(TOTAL - n + 1, TOTAL + 1))) >= tokens)
    by_tokens = build("learning_rate.wsd", **sizes(), warmup_tokens=tokens, decay_tokens=tokens)
    by_steps = build("learning_rate.wsd", warmup_steps=up, decay_steps=down)
    assert factors(by_tokens) == factors(by_steps)
    if tokens:
        phases: list[dict[str, Any]] = [{"until_tokens": tokens, "to": 1.0}, {"to": 0.0}]
        pieces = build("learning_rate.piecewise", **sizes(), phases=phases)
        assert factors(pieces) == factors(
            build("learning_rate.piecewise", phases=[{"steps": up, "to": 1.0}, phases[1]])
        )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("lr.use=learning_rate.cosine", "lr.warmup_tokens=9"), "warmup_tokens needs the sizes of steps and rows"),
        (("lr.use=learning_rate.wsd", "lr.decay_tokens=9", "lr.batching=@batch"), 'write rows = "@packing"'),
        (("lr.phases=[{ until_tokens = 9, to = 1.0 }]",), "phases[0].until_tokens needs the sizes"),
        (("lr.phases=[{ until_tokens = 9, steps = 2, to = 1.0 }]",), "phases[0] has both steps and until_tokens"),
        (("lr.use=learning_rate.wsd", "lr.decay_tokens=9", "lr.decay_percent=1.0"), "both decay_tokens and decay_perc"),
    ],
)
def test_tokens_without_sizes_are_refused(words: tuple[str, ...], said: str) -> None:
    """The problem says which edges to write; two units for one length are a problem, too."""
    with pytest.raises(RecipeError) as caught:
        Recipe.load("first_run", *words).check()
    assert said in str(caught.value)


def test_a_recipe_with_tokens_is_checked_and_more_steps_are_safe_for_its_warm_up() -> None:
    """With both edges there is no problem; a warm-up in tokens does not follow from the number of steps."""
    words = ("lr.use=learning_rate.constant", "lr.warmup_tokens=9000", "lr.batching=@batch", "lr.rows=@packing")
    before, after = (Recipe.load("first_run", *words, f"trainer.steps={steps}") for steps in (240, 300))
    assert not before.check()
    assert [change.impact for change in after.changes_since(before)] == ["safe"]
