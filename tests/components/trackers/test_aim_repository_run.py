"""The Aim run of a run folder, with a double of Aim."""

from pathlib import Path
from typing import Any

import attrs
import pytest

from drawloom.components.trackers.aim_repository import AimLocation, AimRun
from drawloom.components.trackers.remembered_run import read_stored_run_id


@attrs.define
class Aim:
    """Records its calls, and fails at a given one."""

    asked: list[str] = attrs.field(factory=list)
    refuses: str = ""
    name: str = ""
    hash: str = "made by aim"
    options: dict[str, Any] = attrs.field(factory=dict)

    @property
    def Repo(self) -> "Aim":
        return self

    def from_path(self, path: str, init: bool = False) -> str:
        self._ask("repository")
        return path

    def Run(self, run: str, repo: str, **options: Any) -> "Aim":
        self._ask(f"run {run}")
        self.options = options
        return self

    def track(self, number: float, name: str, step: int, context: Any) -> None:
        self._ask(f"{name} {number} at {step}")

    def close(self) -> None:
        self._ask("close")

    def __setitem__(self, name: str, value: Any) -> None:
        self._ask(f"{name} is {value}")

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if self.refuses and what.startswith(self.refuses):
            raise OSError("no")


def run_of(aim: Aim, folder: Path) -> AimRun:
    """Return a run with a property in a folder's repository."""
    run = AimRun(aim, AimLocation(str(folder)), "name")
    run.properties = {"seed": 3}
    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a run folder with a repository."""
    (tmp_path / ".aim").mkdir()
    return tmp_path


def test_a_run_is_opened_once_and_closed(folder: Path) -> None:
    """The first step opens it, with the properties and nothing else of the environment."""
    aim = Aim()
    run = run_of(aim, folder)
    run.open_or_create_repository()
    run.track("abc", 1, {"loss": 2.0, "lr": 1.0}, {})
    run.track("abc", 2, {"loss": 1.0}, {})
    run.close()
    run.close()
    steps = ["loss 2.0 at 1", "lr 1.0 at 1", "loss 1.0 at 2"]
    assert aim.asked == ["repository", "run abc", "hparams is {'seed': 3}", *steps, "close"]
    assert not any(aim.options.values())
    options = {"experiment", "capture_terminal_logs", "log_system_params", "system_tracking_interval"}
    assert aim.options.keys() == options


def test_system_metrics_and_experiment_are_passed_on(folder: Path) -> None:
    """Aim measures at the requested interval."""
    aim = Aim()
    run = AimRun(aim, AimLocation(str(folder)), "name", "looms", 30.0)
    run.open_or_create_repository()
    run.rewind("abc", 0)
    assert (aim.options["system_tracking_interval"], aim.options["experiment"]) == (30.0, "looms")


def test_a_run_on_a_server_is_made_by_aim_and_remembered(tmp_path: Path) -> None:
    """A server makes the identifiers of new runs; the next start of the run folder asks for its own."""
    for opened in ("None", "made by aim"):
        aim = Aim()
        run = AimRun(aim, AimLocation("aim://host:1", shared_by=tmp_path), "name")
        run.open_or_create_repository()
        run.track("", 1, {"loss": 1.0}, {"phase": "train"})
        assert aim.asked == ["repository", f"run {opened}", "loss 1.0 at 1"]
        assert read_stored_run_id(tmp_path, "aim") == "made by aim"


def test_rewinding_a_new_run_only_opens_it(folder: Path) -> None:
    """No values are deleted."""
    aim = Aim()
    run = run_of(aim, folder)
    run.open_or_create_repository()
    run.rewind("abc", 0)
    assert aim.asked == ["repository", "run abc", "hparams is {'seed': 3}"]


@pytest.mark.parametrize("refused", ["repository", "run", "hparams"])
def test_a_run_that_cannot_be_opened_is_tried_once(folder: Path, refused: str) -> None:
    """The first try raises, later calls do nothing, and `usable` is false."""
    aim = Aim(refuses=refused)
    run = run_of(aim, folder)
    with pytest.raises(OSError, match="no"):
        run.open_or_create_repository()
        run.track("abc", 1, {"loss": 1.0}, {})
    assert not run.usable
    asked = list(aim.asked)
    run.rewind("abc", 0)
    run.track("abc", 2, {"loss": 1.0}, {})
    assert aim.asked == asked


def test_a_failed_step_leaves_the_run_usable(folder: Path) -> None:
    """The next step is written."""
    aim = Aim(refuses="loss 1.0")
    run = run_of(aim, folder)
    run.open_or_create_repository()
    with pytest.raises(OSError, match="no"):
        run.track("abc", 1, {"loss": 1.0}, {})
    run.track("abc", 2, {"loss": 2.0}, {})
    assert run.usable
    assert aim.asked[-1] == "loss 2.0 at 2"
