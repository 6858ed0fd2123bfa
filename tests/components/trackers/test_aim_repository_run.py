"""The Aim run of a run folder, with a double of Aim."""

from pathlib import Path
from typing import Any

import attrs
import pytest

from drawloom.components.trackers.aim_repository import AimRun


@attrs.define
class Aim:
    """Records its calls, and fails at a given one."""

    asked: list[str] = attrs.field(factory=list)
    refuses: str = ""
    name: str = ""
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

    def track(self, number: float, name: str, step: int) -> None:
        self._ask(f"{name} {number} at {step}")

    def close(self) -> None:
        self._ask("close")

    def __setitem__(self, name: str, value: str) -> None:
        self._ask(f"{name} is {value}")

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if self.refuses and what.startswith(self.refuses):
            raise OSError("no")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with a repository."""
    (tmp_path / ".aim").mkdir()
    return tmp_path


def test_a_run_is_opened_once_and_closed(folder: Path) -> None:
    """The first step opens it, with the recipe and nothing else of the environment."""
    aim = Aim()
    run = AimRun(aim, folder, "name", "recipe")
    run.prepare()
    run.track("abc", 1, {"loss": 2.0, "lr": 1.0})
    run.track("abc", 2, {"loss": 1.0})
    run.close()
    run.close()
    steps = ["loss 2.0 at 1", "lr 1.0 at 1", "loss 1.0 at 2"]
    assert aim.asked == ["repository", "run abc", "recipe is recipe", *steps, "close"]
    assert not any(aim.options.values())
    assert aim.options.keys() == {"capture_terminal_logs", "log_system_params", "system_tracking_interval"}


def test_rewinding_a_new_run_only_opens_it(folder: Path) -> None:
    """No values are deleted."""
    aim = Aim()
    run = AimRun(aim, folder, "name", "recipe")
    run.prepare()
    run.rewind("abc", 0)
    assert aim.asked == ["repository", "run abc", "recipe is recipe"]


@pytest.mark.parametrize("refused", ["repository", "run", "recipe"])
def test_a_run_that_can_t_be_opened_is_tried_once(folder: Path, refused: str) -> None:
    """The first try raises, later calls do nothing, and `usable` is false."""
    aim = Aim(refuses=refused)
    run = AimRun(aim, folder, "name", "recipe")
    with pytest.raises(OSError, match="no"):
        run.prepare()
        run.track("abc", 1, {"loss": 1.0})
    assert not run.usable
    asked = list(aim.asked)
    run.rewind("abc", 0)
    run.track("abc", 2, {"loss": 1.0})
    assert aim.asked == asked


def test_a_failed_step_leaves_the_run_usable(folder: Path) -> None:
    """The next step is written."""
    aim = Aim(refuses="loss 1.0")
    run = AimRun(aim, folder, "name", "recipe")
    run.prepare()
    with pytest.raises(OSError, match="no"):
        run.track("abc", 1, {"loss": 1.0})
    run.track("abc", 2, {"loss": 2.0})
    assert run.usable
    assert aim.asked[-1] == "loss 2.0 at 2"
