"""Points of a sweep that Optuna chooses from finished runs."""

import math
import statistics
from pathlib import Path

import pytest

from drawloom.components.commands.training._sweep_points import (
    Axis,
    AxisInterval,
    Point,
    SweepSearch,
    list_points_covering_axes,
    read_axes_and_common_words,
)
from drawloom.graph import UserError
from support.run_folders import write_run

pytest.importorskip("optuna", reason="needs the package optuna: pip install 'drawloom[search]'")

ENDED = "2026-11-24 10:00:00,000 INFO drawloom.run: trained steps 1 to 4 in 0:00:01\nresults in runs/a\n"
AXES = [AxisInterval("optimizer.lr", ["1e-05", "1"], 1e-5, 1.0, "log"), Axis("clip.max_norm", ["0.5", "1.0"])]


def search_in(folder: Path, **changes: object) -> SweepSearch:
    """Return a search over a learning rate and a norm."""
    options: dict[str, object] = {"axes": AXES, "common": ["trainer.steps=4"], "seed": 0, "metric": "validation_loss"}
    return SweepSearch(folder=folder, **(options | changes))  # type: ignore[arg-type]


def distance(point: Point) -> float:
    """Return a loss with its minimum at the learning rate 1e-3 and the norm 1.0."""
    rate, norm = (float(word.partition("=")[2]) for word in point.words[1:])
    return abs(math.log10(rate) + 3) + (norm != 1.0)


def test_later_points_are_nearer_to_the_optimum_and_all_differ(tmp_path: Path) -> None:
    """Every choice comes from a new object, as after a resume, and depends on the folder alone."""
    points: list[Point] = []
    for number in range(30):
        chosen = search_in(tmp_path).choose_and_record_point()
        if number in (3, 7):
            write_run(tmp_path / chosen.name, losses=(0.0,))  # unfinished: its loss does not count
        else:
            write_run(tmp_path / chosen.name, losses=(9.0, distance(chosen)), log=ENDED)
        points.append(chosen)
    distances = [distance(point) for point in points]
    assert statistics.median(distances[-10:]) < 0.5 * statistics.median(distances[:10])
    assert len({point.name for point in points}) == 30 and points[0].words[0] == "trainer.steps=4"
    assert search_in(tmp_path).read_points() == points
    content = (tmp_path / "search.json").read_text("utf-8")
    following = search_in(tmp_path).choose_and_record_point()
    (tmp_path / "search.json").write_text(content, "utf-8")
    assert search_in(tmp_path).choose_and_record_point() == following


def test_lists_end_when_every_point_is_chosen(tmp_path: Path) -> None:
    """A search over lists alone chooses every combination once, and then says that there is no other."""
    axes, common = read_axes_and_common_words(["a.b=1,2", "a.c=0..2", "d.e=4"])
    search = search_in(tmp_path, axes=axes, common=common)
    assert len({search.choose_and_record_point().name for _ in range(6)}) == 6
    with pytest.raises(UserError, match="only about 6 of 7 points"):
        search.choose_and_record_point()


def test_another_search_and_a_missing_metric_are_refused(tmp_path: Path) -> None:
    """The errors name the axes of the folder, and the metrics of its runs."""
    write_run(tmp_path / search_in(tmp_path).choose_and_record_point().name, losses=(1.0,), log=ENDED)
    with pytest.raises(UserError, match=r"does not have it; write one of .*validation_loss"):
        search_in(tmp_path, metric="accuracy").choose_and_record_point()
    with pytest.raises(UserError, match=r"search over optimizer.lr, clip.max_norm, and this one is over optimizer.lr"):
        search_in(tmp_path, axes=AXES[:1]).choose_and_record_point()
    (tmp_path / "search.json").write_text("[]", "utf-8")
    with pytest.raises(UserError, match="can't be read"):
        search_in(tmp_path).read_points()


def test_all_values_and_the_ends_of_intervals_are_checked_first() -> None:
    """The first points of a check have every value of every axis."""
    axes, common = read_axes_and_common_words(["a.b=1..3", "c.d=0.5..1.5:uniform", "e.f=2"])
    points = list_points_covering_axes(axes, common)
    assert [point.words for point in points] == [
        ["e.f=2", "a.b=1", "c.d=0.5"],
        ["e.f=2", "a.b=2", "c.d=1.5"],
        ["e.f=2", "a.b=3", "c.d=1.5"],
    ]
