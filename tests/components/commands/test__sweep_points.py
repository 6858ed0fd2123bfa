"""The points of a sweep."""

import pytest

from drawloom.components.commands._sweep_points import points_of
from drawloom.graph import UserError


def test_a_grid_has_every_combination() -> None:
    """Lists and ranges are multiplied, the last one varies first, and words with one value apply to all points."""
    points = points_of(["optimizer.lr=1e-3,3e-4", "trainer.steps=4", "run.seed=0..2"])
    assert [point.name for point in points] == [
        f"lr={lr},seed={seed}" for lr in ("0.001", "0.0003") for seed in range(3)
    ]
    assert points[4].words == ["trainer.steps=4", "optimizer.lr=3e-4", "run.seed=1"]


def test_commas_in_values_separate_nothing() -> None:
    """In a list, a table or a string a comma belongs to the value, and a name has no characters of paths."""
    points = points_of(['lr.phases=[{ to = 1.0, curve = "cosine" }],[{ to = 1.0 }]', 'sample.prompt="a, b"'])
    assert [point.words[0] for point in points] == ['sample.prompt="a, b"'] * 2
    assert points[1].name == "phases=_to_1.0_" and "cosine" in points[0].name
    assert [point.name for point in points_of(["a.path=x/y,../z"])] == ["path=x_y", "path=.._z"]


def test_keys_with_equal_last_parts_are_written_whole() -> None:
    """A name has the last part of each key, unless two axes have it in common."""
    assert points_of(["a.x=1,2", "b.x=1,2", "c.y=3,4"])[0].name == "a.x=1,b.x=1,y=3"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.steps=4"], "there is nothing to vary; write several values"),
        ([], "there is nothing to vary"),
        (["optimizer.lr=1e-3,0.001"], "two points of the sweep are named lr=0.001"),
        (["run.seed=0,1", "run.seed=2,3"], "run.seed is given twice"),
        (["run.seed=2..0"], "run.seed=2..0 is not a range"),
        (["run.seed=0..10000"], "run.seed=0..10000 has 10,001 values"),
        (["a.b=0..999", "a.c=0..999"], "1,000,000 points"),
        (["a.b=" + "x" * 300 + ",y"], "too long for a folder"),
    ],
)
def test_an_impossible_sweep_is_refused(words: list[str], message: str) -> None:
    """The error says what is wrong and how to correct it."""
    with pytest.raises(UserError, match=message):
        points_of(words)
