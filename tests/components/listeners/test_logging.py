"""Where log messages are written."""

import io
import logging
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from drawloom.components.listeners.logging import RunLogging
from drawloom.components.ports.distributed import Processes
from drawloom.components.report.events import parse_log
from drawloom.graph import Every
from drawloom.graph.testing import fake
from support.folders import Folder


@attrs.frozen
class Second:
    """A world group as rank 1 sees it."""

    rank: int = 1


@pytest.fixture
def open_logging(tmp_path: Path, one_rank: Any) -> Iterator[Callable[..., RunLogging]]:
    """Opens logging into the test's folder, and closes it after the test."""
    made: list[RunLogging] = []

    def start(**changes: Any) -> RunLogging:
        made.append(RunLogging(**{"folder": Folder(tmp_path), "mesh": one_rank, "launches": Every()} | changes))
        made[-1].open()
        return made[-1]

    yield start
    for run_logging in made:
        run_logging.close()


def _say_everything() -> None:
    logging.getLogger("drawloom.data").debug("small")
    logging.getLogger("drawloom.data").info("news")
    logging.getLogger("drawloom.run").info("step %d/9", 1)
    logging.getLogger("drawloom.run").warning("skipped")
    logging.getLogger("elsewhere").error("not ours")


def _lines(path: Path) -> list[str]:
    """Return the log without timestamps."""
    return [line.split(" ", 2)[2] for line in path.read_text().splitlines()]


def test_rank_0_prints_step_lines_and_warnings(open_logging: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Step lines go to standard output, warnings with their level to standard error, nothing twice."""
    open_logging()
    _say_everything()
    assert capsys.readouterr() == ("step 1/9\n", "warning: skipped\n")


def test_the_file_has_everything(open_logging: Any, tmp_path: Path) -> None:
    """Everything from DEBUG up, with level and logger, but no messages of other libraries."""
    open_logging()
    _say_everything()
    assert _lines(tmp_path / "log" / "rank-0.log") == [
        "DEBUG drawloom.data: small",
        "INFO drawloom.data: news",
        "INFO drawloom.run: step 1/9",
        "WARNING drawloom.run: skipped",
    ]


def test_another_rank_writes_its_own_file_only(
    open_logging: Any, mesh_of: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    Other ranks than 0 print nothing; the lines in their files have the host and the rank's mesh indices. Reports read
    these lines like others.
    """
    mesh = mesh_of(world=Second(), sizes={"pipeline": 2, "tensor": 4}, indices={"pipeline": 1, "tensor": 3})
    open_logging(mesh=mesh, launches={"processes": fake(Processes, node_rank=1, node_count=2)})
    _say_everything()
    assert capsys.readouterr() == ("", "")
    lines = _lines(tmp_path / "log" / "rank-1.log")
    assert len(lines) == 4 and lines[3] == "[host 1, pipeline 1, tensor 3] WARNING drawloom.run: skipped"
    read = parse_log((tmp_path / "log" / "rank-1.log").read_text("utf-8").splitlines())
    assert [(event.kind, event.text) for event in read.events] == [("warning", "skipped")]


def test_the_level_applies_to_standard_error(open_logging: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """With `info` more goes to standard error, and a step line is still printed once."""
    open_logging(level="info")
    _say_everything()
    assert capsys.readouterr() == ("step 1/9\n", "info: news\nwarning: skipped\n")


def test_a_second_process_appends(open_logging: Any, tmp_path: Path) -> None:
    """A resumed run keeps the earlier log."""
    for word in ("one", "two"):
        logs = open_logging()
        logging.getLogger("drawloom.x").info(word)
        logs.close()
    assert _lines(tmp_path / "log" / "rank-0.log") == ["INFO drawloom.x: one", "INFO drawloom.x: two"]


def test_python_warnings_are_logged(open_logging: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Warnings go to the file and the terminal, with their category."""
    open_logging()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("mind the gap", UserWarning, stacklevel=1)
    assert "UserWarning: mind the gap" in (tmp_path / "log" / "rank-0.log").read_text()
    assert "mind the gap" in capsys.readouterr().err


def test_tracebacks_go_to_the_file_only(open_logging: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The terminal shows the message, the file also the traceback."""
    open_logging()
    try:
        raise ValueError("oh")
    except ValueError:
        logging.getLogger("drawloom.run").exception("it failed")
    assert capsys.readouterr().err == "error: it failed\n"
    assert "ValueError: oh" in (tmp_path / "log" / "rank-0.log").read_text()


def test_a_removed_log_begins_anew_with_a_warning(open_logging: Any, tmp_path: Path) -> None:
    """Messages after `rm -r log` are in a new file, which says why it begins there."""
    open_logging()
    logging.getLogger("drawloom.run").info("one")
    shutil.rmtree(tmp_path / "log")
    logging.getLogger("drawloom.run").info("two")
    path = tmp_path / "log" / "rank-0.log"
    assert _lines(path) == [
        "INFO drawloom.run: two",
        f"WARNING drawloom.run: {path} was removed during the run, and begins anew",
    ]


def test_closing_restores_logging(open_logging: Any) -> None:
    """Handlers, level and warnings.showwarning are as before."""
    loggers = [logging.getLogger(name) for name in ("drawloom", "drawloom.run")]

    def state() -> Any:
        return [(logger.level, list(logger.handlers)) for logger in loggers], warnings.showwarning

    before = state()
    logs = open_logging()
    assert state() != before
    logs.close()
    logs.close()
    assert state() == before


@pytest.mark.parametrize("fault", [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left on device")])
def test_a_standard_output_that_fails_ends_no_run(
    open_logging: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    fault: OSError,
) -> None:
    """`drawloom run recipe.toml | head -1` trains to its end, with a warning on standard error and no traceback."""

    class Failing(io.StringIO):
        def write(self, _text: str) -> int:
            raise fault

    open_logging()
    monkeypatch.setattr(sys, "stdout", Failing())
    logging.getLogger("drawloom.run").info("step 1/9")
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: ")
    assert line.endswith("; step lines are not printed any more, and the run continues")
    assert len(_lines(tmp_path / "log" / "rank-0.log")) == 2


def test_a_sample_sends_no_commands_to_the_terminal(
    open_logging: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A model may have learned escape sequences."""
    open_logging()
    logging.getLogger("drawloom.run").info("a sample:\n%s", "\x1b]52;c;cm0gLXJm\x07")
    assert capsys.readouterr().out == "a sample:\n\\x1b]52;c;cm0gLXJm\\x07\n"


def test_lines_go_to_the_current_stdout(open_logging: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A replacement of sys.stdout after opening, such as a progress bar's, gets the lines."""
    open_logging()
    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        logging.getLogger("drawloom.run").info("later")
    assert (tmp_path / "out").read_text() == "later\n"
