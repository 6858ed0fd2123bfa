"""The Aim run of a run folder, with a double of Aim."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from drawloom.components.trackers import aim as module
from drawloom.components.trackers.aim import AimTracker
from drawloom.components.trackers.remembered_run import read_stored_run_id
from support.folders import Folder


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


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, one_rank: Any, job: Any) -> Callable[..., AimTracker]:
    """Return a function for opening a tracker with a double of Aim, continuing the run `abc` of a folder."""

    def make(aim: Aim, folder: Path, **settings: Any) -> AimTracker:
        monkeypatch.setattr(module, "import_aim", lambda: aim)
        (folder / ".aim").mkdir(exist_ok=True)
        tracker = AimTracker(folder=Folder(folder), mesh=one_rank, job=job, timeout=60.0, **settings)
        tracker.open()
        tracker.store_properties({"seed": 3})
        tracker.load_state_dict({"run": "" if settings.get("repository") else "abc"})
        return tracker

    return make


OPENED = ["repository", "run abc", "hparams is {'seed': 3}"]


def test_a_run_is_opened_once_and_closed(make: Any, tmp_path: Path) -> None:
    """The first step opens it, with the properties and nothing else of the environment."""
    aim = Aim()
    tracker = make(aim, tmp_path)
    tracker.track(1, {"loss": 2.0, "lr": 1.0})
    tracker.track(2, {"loss": 1.0})
    tracker.close()
    tracker.close()
    assert aim.asked == [*OPENED, "loss 2.0 at 1", "lr 1.0 at 1", "loss 1.0 at 2", "close"]
    assert not any(aim.options.values())
    options = {"experiment", "capture_terminal_logs", "log_system_params", "system_tracking_interval"}
    assert aim.options.keys() == options


def test_rewinding_a_new_run_only_opens_it_with_the_settings(make: Any, tmp_path: Path) -> None:
    """No values are deleted; Aim measures at the requested interval."""
    aim = Aim()
    tracker = make(aim, tmp_path, experiment="looms", system_metrics=30.0)
    tracker.rewind(0)
    assert aim.asked == OPENED
    assert (aim.options["system_tracking_interval"], aim.options["experiment"]) == (30.0, "looms")
    tracker.close()


def test_a_run_on_a_server_is_made_by_aim_and_remembered(make: Any, tmp_path: Path) -> None:
    """A server makes the identifiers of new runs; the next start of the run folder asks for its own."""
    for opened in ("None", "made by aim"):
        aim = Aim()
        tracker = make(aim, tmp_path, repository="aim://host:1")
        tracker.track_in_context(1, {"loss": 1.0}, {"phase": "train"})
        tracker.close()
        assert aim.asked == ["repository", f"run {opened}", "hparams is {'seed': 3}", "loss 1.0 at 1", "close"]
        assert read_stored_run_id(tmp_path, "aim") == "made by aim"


@pytest.mark.parametrize("refused", ["repository", "run", "hparams"])
def test_a_run_that_cannot_be_opened_is_tried_once(
    make: Any, tmp_path: Path, refused: str, caplog: pytest.LogCaptureFixture
) -> None:
    """After the first failure, later calls do nothing, and the warning says so."""
    aim = Aim(refuses=refused)
    tracker = make(aim, tmp_path)
    for step in (1, 2):
        tracker.track(step, {"loss": 1.0})
    tracker.rewind(0)
    tracker.close()
    assert [call for call in aim.asked if call != "close"] == OPENED[
        : 1 + ["repository", "run", "hparams"].index(refused)
    ]
    assert caplog.messages == ["Aim failed, nothing is written to it: OSError: no"]


def test_a_failed_step_leaves_the_run_usable(make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The next step is written."""
    aim = Aim(refuses="loss 1.0")
    tracker = make(aim, tmp_path)
    for step, loss in ((1, 1.0), (2, 2.0)):
        tracker.track(step, {"loss": loss})
    tracker.close()
    assert aim.asked[-2:] == ["loss 2.0 at 2", "close"]
    assert caplog.messages == ["Aim failed, some steps will be missing there: OSError: no"]
