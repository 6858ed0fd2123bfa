"""The report at the end of a run; `tests/runs/test_report.py` writes it in one."""

import logging
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.report.html import HtmlReport
from drawloom.graph import Every, ResolvedRecipe
from support.folders import Folder


def report(folder: Path, mesh: Any, draw: Any = lambda step: "<svg></svg>") -> HtmlReport:
    """Return a report of a run without a schedule."""
    recipe = ResolvedRecipe("format = 1\n", "hash", draw=draw)
    return HtmlReport(folder=Folder(folder), mesh=mesh, recipe=recipe, schedules=Every(), batching=Every())


def test_a_report_is_written_again_for_a_later_step(tmp_path: Path, one_rank: Any) -> None:
    """A run continued to more steps writes it again."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "loss": 1.0}\n', "utf-8")
    task = report(tmp_path, one_rank)
    assert not task.has_result_of_step(3)
    task.run_after_training(3)
    assert task.has_result_of_step(3) and not task.has_result_of_step(4) and not task.has_result_of_step(30)
    assert "<svg></svg>" in (tmp_path / "report.html").read_text("utf-8")


def test_a_report_that_fails_is_a_warning(tmp_path: Path, one_rank: Any, caplog: pytest.LogCaptureFixture) -> None:
    """No fault of the folder or the drawing ends the run."""
    with caplog.at_level(logging.WARNING, "drawloom.run"):
        (tmp_path / "metrics.jsonl").symlink_to("/etc/passwd")
        report(tmp_path, one_rank).run_after_training(3)
        report(tmp_path, one_rank, draw=lambda step: 1 / 0).run_after_training(3)
    assert len(caplog.records) == 2 and not report(tmp_path, one_rank).has_result_of_step(3)


def test_the_share_of_time_in_steps_is_a_sentence(
    tmp_path: Path, one_rank: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The log spells out what ETTR means; the report shows that the run has ended, before the log says so."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "tokens": 8, "tokens_per_second": 4.0}\n', "utf-8")
    (tmp_path / "log").mkdir()
    (tmp_path / "log/rank-0.log").write_text("2020-01-01 00:00:00,500 INFO drawloom.run: run     mine, in runs/mine\n")
    with caplog.at_level(logging.INFO, "drawloom.run"):
        report(tmp_path, one_rank).run_after_training(3)
    assert caplog.records[-1].getMessage().startswith("time    0.0% in steps that count: 0:00:02 of ")
    content = (tmp_path / "report.html").read_text("utf-8")
    assert "<td>ended</td><td>all 3 steps are done</td>" in content and "<td>killed</td>" not in content
