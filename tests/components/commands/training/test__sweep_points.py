"""The points of a sweep."""

from pathlib import Path

import pytest

from drawloom.components.commands.training._sweep_points import make_sweep_points
from drawloom.graph import UserError


def test_a_grid_has_every_combination() -> None:
    """Lists and ranges are multiplied, the last one varies first, and words with one value apply to all points."""
    points = make_sweep_points(["optimizer.lr=1e-3,3e-4", "trainer.steps=4", "run.seed=0..2"])
    assert [point.name for point in points] == [
        f"lr={lr},seed={seed}" for lr in ("0.001", "0.0003") for seed in range(3)
    ]
    assert points[4].words == ["trainer.steps=4", "optimizer.lr=3e-4", "run.seed=1"]


def test_commas_in_values_separate_nothing() -> None:
    """In a list, a table or a string a comma belongs to the value, and a name has no characters of paths."""
    points = make_sweep_points(['lr.phases=[{ to = 1.0, curve = "cosine" }],[{ to = 1.0 }]', 'sample.prompt="a, b"'])
    assert [point.words[0] for point in points] == ['sample.prompt="a, b"'] * 2
    assert points[1].name == "phases=_to_1.0_" and "cosine" in points[0].name
    assert [point.name for point in make_sweep_points(["a.path=x/y,../z"])] == ["path=x_y", "path=.._z"]


def test_keys_with_equal_last_parts_are_written_whole() -> None:
    """A name has the last part of each key, unless two axes have it in common."""
    assert make_sweep_points(["a.x=1,2", "b.x=1,2", "c.y=3,4"])[0].name == "a.x=1,b.x=1,y=3"


def test_random_points_are_in_their_intervals_and_more_of_them_keep_the_first() -> None:
    """On the log scale half of the points are below the geometric mean; the same seed gives the same points."""
    words = ["optimizer.lr=1e-4..1e-2:log", "clip.max_norm=0.5..1.5:uniform", "run.seed=0,1", "trainer.steps=4"]
    points = make_sweep_points(words, count=200)
    assert points[:7] == make_sweep_points(words, count=7) and points != make_sweep_points(words, count=200, seed=1)
    rates = [float(point.words[1].removeprefix("optimizer.lr=")) for point in points]
    norms = [float(point.words[2].removeprefix("clip.max_norm=")) for point in points]
    assert all(1e-4 <= rate <= 1e-2 for rate in rates) and all(0.5 <= norm <= 1.5 for norm in norms)
    assert 70 < sum(rate < 1e-3 for rate in rates) < 130 and 70 < sum(norm < 1 for norm in norms) < 130
    assert {point.words[3] for point in points} == {"run.seed=0", "run.seed=1"}
    assert len({point.name for point in points}) == 200 and points[0].words[0] == "trainer.steps=4"


def test_axes_are_read_from_a_table(tmp_path: Path) -> None:
    """Lists, ranges, intervals and single values, also with quoted keys; words are further axes."""
    file = tmp_path / "axes.toml"
    text = '[axes]\noptimizer.lr = [1e-3, 3e-4]\nrun.seed = "0..1"\nmodel.activation = "silu"\n'
    file.write_text(text, "utf-8")
    points = make_sweep_points(["trainer.steps=1,2"], file)
    assert len(points) == 8 and points[0].name == "lr=0.001,seed=0,steps=1"
    assert points[0].words[0] == 'model.activation="silu"'
    file.write_text(text.replace("optimizer.lr", '"optimizer.lr"').replace("run.seed", "'run.seed'"), "utf-8")
    assert make_sweep_points(["trainer.steps=1,2"], file) == points
    file.write_text('[axes]\noptimizer.lr = { low = 1e-4, high = 1e-2, scale = "log" }\n', "utf-8")
    assert make_sweep_points([], file, count=3) == make_sweep_points(["optimizer.lr=1e-4..1e-2:log"], count=3)


def test_points_are_listed_in_a_table(tmp_path: Path) -> None:
    """Every table is a point, named by the differing values."""
    file = tmp_path / "points.toml"
    file.write_text('[[points]]\na = {x = 1, y = "s"}\n[[points]]\na = {x = 2, y = "s"}\nb.z = true\n', "utf-8")
    assert [(point.name, point.words) for point in make_sweep_points(["c.d=1"], file)] == [
        ("x=1", ["c.d=1", 'a.y="s"', "a.x=1"]),
        ("x=2,z=true", ["c.d=1", 'a.y="s"', "a.x=2", "b.z=true"]),
    ]
    with pytest.raises(UserError, match="write one or the other"):
        make_sweep_points(["c.d=1,2"], file)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.steps=4"], "there is nothing to vary; write several values"),
        ([], "there is nothing to vary"),
        (["optimizer.lr=1e-3,0.001"], "two points of the sweep are named lr=0.001"),
        (["run.seed=0,1", "run.seed=2,3"], "run.seed is given twice"),
        (["run.seed=2..0"], "run.seed=2..0 is not a range"),
        (["run.seed=0..10000"], "run.seed=0..10000 has 10,001 values"),
        (["a.b=1.0..2.0:log"], "write --random 20"),
        (["a.b=1.0..2.0:linear"], "write log or uniform"),
        (["a.b=1e-4..1e-2"], "interval without a scale; write a.b=1e-4..1e-2:log or"),
        (["run.name=x,y"], "run.name can't vary: the sweep names its runs"),
        (["a.b=0..2.0:log"], "a smaller number above 0 first"),
        (["a.b=0..999", "a.c=0..999"], "1,000,000 points"),
        (["a.b=" + "x" * 300 + ",y"], "too long for a folder"),
    ],
)
def test_an_impossible_sweep_is_refused(words: list[str], message: str) -> None:
    """The error says what is wrong and how to correct it."""
    with pytest.raises(UserError, match=message):
        make_sweep_points(words)
