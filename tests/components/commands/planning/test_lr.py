"""`drawloom lr`."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from drawloom.components.learning_rate.piecewise import Piecewise, SchedulePiece
from drawloom.graph.cli.main import main

Capture = pytest.CaptureFixture[str]
RAMP = "batch.ramp=[{ size = 4, until_step = 10 }]"
SMALL = "batch.micro_size=4"


def run_lr(capsys: Capture, *arguments: str, code: int = 0) -> str:
    """Return the output of the command: stdout if it succeeds, else stderr."""
    exit_code = main(["lr", *arguments])
    said = capsys.readouterr()
    assert exit_code == code, said.err
    return said.err if code else said.out


def data(capsys: Capture, *arguments: str) -> Any:
    """Return the JSON output of the command."""
    return json.loads(run_lr(capsys, *arguments, "--format", "json"))["curves"]


def test_rates_and_rows_equal_those_of_the_run(capsys: Capture) -> None:
    """Each step has the optimizer's rate times the schedule's factor; rows are drawn if a ramp changes them."""
    curves = data(capsys, "first_run", RAMP, SMALL)
    lr = Piecewise(start=0.1, phases=[SchedulePiece(until_percent=10.0, to=1.0), SchedulePiece(to=0.1, curve="cosine")])
    assert curves["lr of [optimizer]"] == [[step, 4e-3 * lr.factor(step - 1, 240)] for step in range(1, 241)]
    assert curves["rows in a step of [batch]"] == [[step, 4 if step <= 10 else 16] for step in range(1, 241)]
    assert list(data(capsys, "first_run")) == ["lr of [optimizer]"]


def test_warm_ups_in_tokens_are_drawn_without_the_data(capsys: Capture, tmp_path: Path) -> None:
    """A recipe for many ranks, with a corpus missing on this machine, has a picture up to its last step."""
    words = ("lr.use=learning_rate.constant", "lr.warmup_tokens=100000", "lr.batching=@batch", "lr.rows=@packing")
    more = (f"corpus.paths=['{tmp_path}/none.txt']", "corpus.use=data.text_files", "mesh.data_replicate=8")
    curves = data(capsys, "first_run", *words, *more, "batch.micro_size=2", "trainer.steps=100000")
    points = curves["lr of [optimizer]"]
    assert len(points) == 2000 and points[0] == [1, 4e-3 / 25] and points[-1] == [100000, 4e-3]


def test_pictures_have_all_curves(capsys: Capture) -> None:
    """Text and SVG name both curves and the last step; the SVG is well-formed, whatever the recipe is called."""
    text = run_lr(capsys, "first_run", RAMP, SMALL)
    svg = run_lr(capsys, "first_run", RAMP, SMALL, "--format", "svg")
    for name in ("lr of [optimizer]", "rows in a step of [batch]", "240"):
        assert name in text and name in svg
    drawn = ElementTree.fromstring(svg)
    lines = [polyline.attrib["points"].split() for polyline in drawn.iter("{http://www.w3.org/2000/svg}polyline")]
    assert [len(points) for points in lines] == [240, 240]


def test_a_recipe_without_a_rate_is_refused(capsys: Capture, tmp_path: Path) -> None:
    """The message says whether the learning rate is missing or refused, or the trainer is missing."""
    assert "[optimizer] lr: -1.0 is not above 0" in run_lr(capsys, "first_run", "optimizer.lr=-1", code=2)
    words = "edit.trainer.phases.remove=@optimizer"
    assert "no phase of the recipe has a setting lr" in run_lr(capsys, "first_run", words, code=2)
    (tmp_path / "none.toml").write_text('[device]\nuse = "distributed.device"\n')
    assert "[trainer]" in run_lr(capsys, str(tmp_path / "none.toml"), code=2)
