"""A killed and resumed run, compared with an uninterrupted one."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from drawloom.components.commands.runs._replay import RecordedSteps
from drawloom.components.commands.runs.verify_resume import HASHES, Runs, describe_first_difference
from drawloom.graph import UserError
from drawloom.graph.cli.main import main

RUN = """
import json, sys, time
from pathlib import Path
folder = Path(sys.argv[-1].partition("=")[2])
steps, pause, fail = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "fail"
(folder / "checkpoints").mkdir(parents=True, exist_ok=True)
if fail:
    print("no such corpus")
    sys.exit(2)
done = max((int(path.name[5:]) for path in (folder / "checkpoints").iterdir()), default=0)
lines = (folder / "metrics.jsonl").read_text().splitlines()[:done] if done else []
(folder / "metrics.jsonl").write_text("".join(line + chr(10) for line in lines))
for step in range(done + 1, steps + 1):
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step}) + chr(10))
    if step == steps and sys.argv[3] == "short":
        (folder / "checkpoints" / f"step-{steps}").mkdir()
        (folder / "checkpoints" / f"step-{steps // 2}").mkdir()
    elif step in (steps // 2, steps) and sys.argv[3] != "short":
        (folder / "checkpoints" / f"step-{step}").mkdir()
    time.sleep(pause)
    (folder / "digests").mkdir(exist_ok=True)
    with open(folder / "digests" / "rank-0.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "digests": {}}) + chr(10))
"""
"""Something that behaves like a run."""


def _runs(folder: Path, steps: int, pause: float, how: str = "") -> Runs:
    return Runs(folder, [sys.executable, "-c", RUN, str(steps), str(pause), how], steps)


def test_it_kills_between_half_and_the_end(tmp_path: Path) -> None:
    """The second run is killed when half of its steps are committed, and resumes from there."""
    runs = _runs(tmp_path, 10, 0.05)
    runs.run_to_end("straight")
    assert 5 <= runs.kill_resume_and_get_step() < 10
    for name in ("straight", "resumed"):
        rows = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(row)["step"] for row in rows] == list(range(1, 11))


def test_it_does_not_kill_before_the_last_committed_step_is_hashed(tmp_path: Path) -> None:
    """A kill between a commit and its hashes would leave hashes out, and look like a difference."""
    runs = _runs(tmp_path, 10, 0.2)
    runs.run_to_end("straight")
    runs.kill_resume_and_get_step()
    rows = (tmp_path / "resumed" / "digests" / "rank-0.jsonl").read_text().splitlines()
    assert 5 in [json.loads(row)["step"] for row in rows]


def test_a_run_that_is_too_short_to_be_killed_is_reported(tmp_path: Path) -> None:
    """Comparing a run with itself would show nothing."""
    with pytest.raises(UserError, match="ends before it can be killed; take more steps than 4"):
        _runs(tmp_path, 4, 0.0, "short").kill_resume_and_get_step()


def test_a_run_that_fails_is_shown(tmp_path: Path) -> None:
    """The error shows the end of the run's output, and does not blame resuming."""
    for run in (lambda runs: runs.run_to_end("straight"), Runs.kill_resume_and_get_step):
        with pytest.raises(UserError, match="a reason other than resuming:\nno such corpus"):
            run(_runs(tmp_path, 4, 0.0, "fail"))


REPORT = """W1120 13:39:52.602000 10888 torch/distributed/run.py:874] Setting OMP_NUM_THREADS
a.toml:1:1: warning: [sample] is not built; remove it (DL322)
no such corpus
E1120 13:39:52.856000 10888 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 2) local_rank: 0
Traceback (most recent call last):
  File "torchrun", line 6, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""


def test_output_of_torchrun_about_a_failed_run_is_left_out(tmp_path: Path) -> None:
    """torchrun's report does not contain the cause; it is shown only if there is no other output."""
    for report, words in ((REPORT, "resuming:\nno such corpus$"), (REPORT[-66:], "ChildFailedError:$")):
        command = [sys.executable, "-c", f"print({report.strip()!r}); exit(1)"]
        with pytest.raises(UserError, match=words):
            Runs(tmp_path, command, 4).run_to_end("straight")


def _write(run: Path, rows: list[dict[str, Any]], ranks: list[list[dict[str, Any]]]) -> Path:
    (run / "digests").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for rank, lines in enumerate(ranks):
        (run / "digests" / f"rank-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def _run(run: Path, **changes: Any) -> Path:
    """Return a run with three steps on two ranks; `loss` and `digest` are the third step's values."""
    rows = [{"step": step, "loss": step / 3, "memory": changes.get("memory", 1)} for step in (1, 2, 3)]
    rows[2]["loss"] = changes.get("loss", 1.0)
    digests = {"stages": "a", "stages/w": "b", "optimizer/w": "c", "aim": "d"}
    ranks = [[{"step": step, "digests": dict(digests)} for step in (1, 2, 3)] for _ in range(2)]
    ranks[1][2]["digests"] = digests | changes.get("digests", {})
    return _write(run, rows[: changes.get("length", 3)], ranks)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"memory": 7}, None),
        ({"digests": {"aim": "other"}}, None),
        ({"loss": 1.5}, "loss is 1.0 uninterrupted, 1.5 resumed"),
        ({"digests": {"stages/w": "x"}}, "rank 1: stages/w"),
        ({"digests": {"stages": "x", "optimizer/w": "y"}}, "rank 1: stages and 1 more"),
        ({"digests": {"more": "x"}}, "rank 1: more"),
        ({"length": 2}, "loss is 1.0 uninterrupted, missing resumed"),
    ],
)
def test_the_first_difference_is_named(tmp_path: Path, changes: dict[str, Any], words: str | None) -> None:
    """A difference names step, metric or tensor, and rank; machine metrics and trackers' state are ignored."""
    runs = _run(tmp_path / "a"), _run(tmp_path / "b", **changes)
    one, other = (RecordedSteps.read(run, HASHES, ["aim"]) for run in runs)
    assert describe_first_difference(one, other) == (None if words is None else (3, words))


@pytest.mark.parametrize(
    ("step", "varies", "words"),
    [
        (10, False, ["neither run was killed before this step"]),
        (10, True, ["neither run was killed before this step", "the cause may be the GPU"]),
        (11, False, []),
        (11, True, ["resuming need not be the cause, it may be the GPU"]),
    ],
)
def test_other_causes_than_resuming_are_reported(
    step: int,
    varies: bool,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """
    A difference before the kill does not come from resuming; on a GPU the error names the setting for determinism.
    """

    def run(runs: Runs) -> int:
        for name, loss in (("straight", 1.0), ("resumed", 2.0)):
            rows = [{"step": number, "loss": loss if number == step else 0.5} for number in range(1, 21)]
            _write(runs.folder / name, rows, [])
        return 12

    monkeypatch.setattr(Runs, "run_to_end", lambda *_: None)
    monkeypatch.setattr(Runs, "kill_resume_and_get_step", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: varies)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(varies))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["verify-resume", "first_run"]) == 1
    first, *reasons, _place = capsys.readouterr().out.splitlines()[1:]
    assert first == f"step {step} differs: loss is 1.0 uninterrupted, 2.0 resumed"
    assert len(reasons) == len(words) and all(text.startswith(word) for text, word in zip(reasons, words, strict=True))
    assert varies == any("randomness.deterministic=true" in text for text in reasons)
    settled = ["randomness.deterministic=true"]
    assert main(["verify-resume", "first_run", *settled]) == 1
    assert "GPU" not in capsys.readouterr().out
