"""Metrics in an Aim repository."""

import math
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from drawloom.components.trackers.aim import AimTracker, load_aim
from drawloom.graph import ResolvedRecipe, UserError
from support.folders import Folder

pytestmark = pytest.mark.usefixtures("loaded")
RECIPE = ResolvedRecipe('[run]\nname = "test"\n', "hash")


@attrs.frozen
class Second:
    """A world group as rank 1 sees it."""

    rank: int = 1
    size: int = 2


@pytest.fixture(scope="module")
def loaded() -> None:
    """Aim is imported, which takes seconds of those for which a tracker waits."""
    load_aim()


@pytest.fixture
def make(tmp_path: Path, one_rank: Any, job: Any) -> Callable[..., AimTracker]:
    """Makes an open tracker, as each process of a run does."""

    def make(**changes: Any) -> AimTracker:
        values = {"folder": Folder(tmp_path), "mesh": one_rank, "job": job, "recipe": RECIPE, "timeout": 60.0} | changes
        tracker = AimTracker(**values)
        tracker.open()
        return tracker

    return make


@pytest.fixture(scope="session")
def empty_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository without runs; creating one takes Aim a second."""
    folder = tmp_path_factory.mktemp("repository")
    load_aim().Repo.from_path(str(folder), init=True)
    return folder / ".aim"


@pytest.fixture
def with_repository(empty_repository: Path, tmp_path: Path) -> None:
    """Copies an empty repository to the run folder."""
    shutil.copytree(empty_repository, tmp_path / ".aim")


def _reopened(folder: Path, run: str) -> Any:
    return load_aim().Run(run, repo=str(folder), capture_terminal_logs=False, system_tracking_interval=None)


def _series(folder: Path, run: str) -> dict[str, dict[int, float]]:
    """Every metric of a run: value by step."""
    opened = _reopened(folder, run)
    series = {}
    for metric in opened.metrics():
        stored = opened.series_run_trees[2].subtree((metric.context.idx, metric.name))
        keys, steps = stored.array("step", dtype="int64").sparse_list()
        values = dict(zip(*metric.values.sparse_list(), strict=True))
        assert values.keys() == set(keys)
        series[metric.name] = {step: values[key] for key, step in sorted(zip(keys, steps, strict=True), key=_second)}
    opened.close()
    return series


def _second(pair: tuple[int, int]) -> int:
    return pair[1]


def _runs(folder: Path) -> list[str]:
    return [path.name for path in (folder / ".aim" / "meta" / "chunks").iterdir()]


def test_finite_values_are_stored_by_step(make: Any, tmp_path: Path) -> None:
    """Numbers of all kinds become floats under their names; others are left out; the recipe is stored."""
    tracker = make()
    assert (tmp_path / ".aim" / "VERSION").exists()
    tracker.track(1, {"loss": 2.5, "tokens": 7, "skipped": True})
    tracker.track(2, {"loss": None, "grad_norm": math.nan, "tokens": 14})
    run = tracker.state_dict()["run"]
    tracker.close()
    assert _series(tmp_path, run) == {"loss": {1: 2.5}, "tokens": {1: 7.0, 2: 14.0}, "skipped": {1: 1.0}}
    opened = _reopened(tmp_path, run)
    assert (opened["recipe"], opened.name) == (RECIPE.text, "test")
    opened.close()


@pytest.mark.usefixtures("with_repository")
def test_a_resumed_run_has_one_value_per_step(make: Any, tmp_path: Path) -> None:
    """Killed after step 6 and restored to step 3, the series equals that of an uninterrupted run to step 5."""
    first = make()
    for step in range(1, 7):
        first.track(step, {"loss": float(step), "lr": 1.0})
    state = first.state_dict()
    first.close()
    second = make()
    second.load_state_dict(state)
    second.rewind(3)
    for step in (4, 5):
        second.track(step, {"loss": -float(step)})
    second.close()
    assert _runs(tmp_path) == [state["run"]]
    assert _series(tmp_path, state["run"]) == {
        "loss": {1: 1.0, 2: 2.0, 3: 3.0, 4: -4.0, 5: -5.0},
        "lr": {1: 1.0, 2: 1.0, 3: 1.0},
    }


@pytest.mark.usefixtures("with_repository")
def test_a_rewound_summary_is_that_of_the_remaining_values(make: Any, tmp_path: Path) -> None:
    """Last value, maximum and minimum ignore deleted steps, also if a metric loses all."""
    first = make()
    for step, loss in enumerate([2.0, 3.0, 9.0, -9.0], start=1):
        first.track(step, {"loss": loss} | ({"late": 5.0} if step > 2 else {}))
    state = first.state_dict()
    first.close()
    second = make()
    second.load_state_dict(state)
    second.rewind(2)
    second.track(3, {"late": 6.0})
    second.close()
    opened = _reopened(tmp_path, state["run"])
    (names,) = opened.meta_run_tree.collect("traces").values()
    opened.close()
    wanted = {"first_step", "last_step", "first", "last", "min", "max"}
    found = {name: {key: summary[key] for key in wanted} for name, summary in names.items()}
    assert found == {
        "loss": {"first_step": 1, "last_step": 2, "first": 2.0, "last": 3.0, "min": 2.0, "max": 3.0},
        "late": {"first_step": 3, "last_step": 3, "first": 6.0, "last": 6.0, "min": 6.0, "max": 6.0},
    }


@pytest.mark.usefixtures("with_repository")
def test_a_restart_without_a_checkpoint_reuses_the_aim_run(make: Any, tmp_path: Path) -> None:
    """Without saved state, and with a stale lock of a live process id, no second run is made."""
    first = make()
    first.track(1, {"loss": 1.0})
    run = first.state_dict()["run"]
    first.close()
    machine = load_aim().sdk.lock_manager.LockManager.machine_id
    (tmp_path / ".aim" / "locks" / f"{run}.softlock").write_text(f"{machine}-1-0")
    second = make()
    second.rewind(0)
    second.track(1, {"loss": 3.0})
    second.close()
    assert _runs(tmp_path) == [run]
    assert _series(tmp_path, run) == {"loss": {1: 3.0}}


@pytest.mark.usefixtures("with_repository")
def test_a_removed_aim_run_is_recreated(make: Any, tmp_path: Path) -> None:
    """A run that saved state names but does not exist is made under its hash, with the values that follow."""
    tracker = make()
    tracker.load_state_dict({"run": "a" * 24})
    tracker.rewind(5)
    tracker.track(6, {"loss": 1.0})
    tracker.close()
    assert _series(tmp_path, "a" * 24) == {"loss": {6: 1.0}}


@pytest.mark.usefixtures("with_repository")
def test_closing_ends_the_aim_run(make: Any, tmp_path: Path) -> None:
    """After close there is no lock and no thread, and the run has an end time."""
    before = set(threading.enumerate())
    tracker = make()
    tracker.track(1, {"loss": 1.0})
    run = tracker.state_dict()["run"]
    tracker.close()
    assert not list((tmp_path / ".aim" / "locks").iterdir())
    assert set(threading.enumerate()) == before
    container = load_aim().Repo.from_path(str(tmp_path)).request_tree("meta", run, read_only=True)
    assert container.subtree(("meta", "chunks", run))["end_time"] > 0


@pytest.mark.usefixtures("with_repository")
def test_without_a_step_there_is_no_aim_run(make: Any, tmp_path: Path) -> None:
    """A run that was finished already adds nothing to the repository."""
    make().close()
    assert not (tmp_path / ".aim" / "meta" / "chunks").exists()


@pytest.mark.usefixtures("with_repository")
def test_aim_does_not_use_the_network(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection and no name lookup is attempted, and of the environment only the recipe is recorded."""
    attempts: list[Any] = []
    monkeypatch.setattr(socket.socket, "connect", lambda *arguments: attempts.append(arguments))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **_: attempts.append(arguments))
    tracker = make()
    tracker.track(1, {"loss": 1.0})
    tracker.close()
    assert not attempts
    opened = _reopened(tmp_path, tracker.state_dict()["run"])
    assert opened[...] == {"recipe": RECIPE.text}
    assert opened.get_terminal_logs() is None
    opened.close()


def test_a_missing_package_names_the_extra(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the command that installs it."""
    monkeypatch.setitem(sys.modules, "aim", None)
    with pytest.raises(UserError, match=r"pip install 'drawloom\[aim\]'"):
        make()


def test_another_rank_neither_loads_nor_writes(make: Any, mesh_of: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Aim need not even be installed there; state from the main rank is taken."""
    monkeypatch.setitem(sys.modules, "aim", None)
    tracker = make(mesh=mesh_of(world=Second()))
    assert tracker.state_dict() == {"run": ""}
    tracker.load_state_dict({"run": "abc"})
    tracker.rewind(0)
    tracker.track(1, {"loss": 1.0})
    tracker.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("with_repository")
def test_what_aim_raises_is_one_warning(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that Aim refuses is missing, the others are there."""
    track = load_aim().Run.track

    def refuse(self: Any, value: float, name: str, step: int) -> None:
        if step in (2, 3):
            raise OSError("disk full")
        track(self, value, name=name, step=step)

    monkeypatch.setattr(load_aim().Run, "track", refuse)
    tracker = make()
    for step in range(1, 5):
        tracker.track(step, {"loss": 1.0})
    tracker.close()
    assert caplog.messages == ["Aim failed, some steps will be missing there: OSError: disk full"]
    assert list(_series(tmp_path, tracker.state_dict()["run"])["loss"]) == [1, 4]


def test_a_repository_that_cannot_be_opened_is_tried_once(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file in its place: one warning, and the run continues."""
    (tmp_path / ".aim").write_text("")
    tracker = make()
    for step in range(1, 5):
        tracker.track(step, {"loss": 1.0})
    tracker.close()
    (message,) = caplog.messages
    assert message.startswith("Aim failed, nothing is written to it: ")


@pytest.mark.usefixtures("with_repository")
def test_an_aim_that_hangs_delays_nothing(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a full disk Aim hangs: tracking returns at once, closing within its limit, and there is one warning."""
    gate = threading.Event()
    monkeypatch.setattr(load_aim().Run, "track", lambda *_, **__: gate.wait(20))
    tracker = make(queue_size=2, timeout=0.1)
    start = time.monotonic()
    for step in range(1, 100):
        tracker.track(step, {"loss": 1.0})
    tracker.close()
    assert time.monotonic() - start < 5
    assert caplog.messages == ["Aim does not keep up; some steps will be missing there"]
    gate.set()
    for thread in threading.enumerate():
        if thread.name == "aim":
            thread.join(10)


def test_a_repository_elsewhere_is_refused(make: Any, tmp_path: Path) -> None:
    """Nothing is written through a link that a run folder came with."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / ".aim").symlink_to(elsewhere)
    with pytest.raises(UserError, match="symbolic link"):
        make()
    assert not list(elsewhere.iterdir())
