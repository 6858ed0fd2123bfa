"""Metrics in an Aim repository."""

import math
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.ports.run import RunInfo
from drawloom.components.ports.tracking import Histogram
from drawloom.components.trackers.aim import AimTracker, import_aim
from drawloom.components.trackers.remembered_run import read_stored_run_id
from drawloom.graph import UserError
from drawloom.graph.testing import fake
from support.checkpoints import SingleRankMesh
from support.doubles import SecondRank
from support.folders import Folder
from support.processes import run_ranks

pytestmark = pytest.mark.usefixtures("load_before_timing")
PROPERTIES = {"run": {"name": "test"}, "optimizer": {"betas": [0.9, 0.95], "lr": 0.1}}


@pytest.fixture(scope="module")
def load_before_timing() -> None:
    """Import Aim before its import seconds count for a tracker's timeout."""
    import_aim()


@pytest.fixture
def make(tmp_path: Path, one_rank: Any, job: Any) -> Callable[..., AimTracker]:
    """Return a function for opening a tracker, as in a run's process."""

    def make(**changes: Any) -> AimTracker:
        values = {"folder": Folder(tmp_path), "mesh": one_rank, "job": job, "timeout": 60.0} | changes
        tracker = AimTracker(**values)
        tracker.open()
        tracker.store_properties(PROPERTIES)
        return tracker

    return make


@pytest.fixture(scope="session")
def empty_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository without runs; creating one takes Aim a second."""
    folder = tmp_path_factory.mktemp("repository")
    import_aim().Repo.from_path(str(folder), init=True)
    return folder / ".aim"


@pytest.fixture
def with_repository(empty_repository: Path, tmp_path: Path) -> None:
    """Copies an empty repository to the run folder."""
    shutil.copytree(empty_repository, tmp_path / ".aim")


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for_server(port: int, seconds: float) -> None:
    """Wait until something listens on a port; TimeoutError after this many seconds."""
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise TimeoutError(f"nothing listens on port {port}") from None
            time.sleep(0.2)


def _reopen(folder: Path, run: str) -> Any:
    return import_aim().Run(run, repo=str(folder), capture_terminal_logs=False, system_tracking_interval=None)


def _series(folder: Path, run: str) -> dict[str, dict[int, float]]:
    """Every metric of a run: value by step."""
    opened = _reopen(folder, run)
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
    """Numbers of all kinds become floats under their names; others are left out; properties are `hparams`."""
    tracker = make()
    tracker.rewind(0)
    assert (tmp_path / ".aim" / "VERSION").exists()
    tracker.track(1, {"loss": 2.5, "tokens": 7, "skipped": True})
    tracker.track(2, {"loss": None, "grad_norm": math.nan, "tokens": 14})
    run = tracker.state_dict()["run"]
    tracker.close()
    assert _series(tmp_path, run) == {"loss": {1: 2.5}, "tokens": {1: 7.0, 2: 14.0}, "skipped": {1: 1.0}}
    opened = _reopen(tmp_path, run)
    assert (opened["hparams"], opened.name) == (PROPERTIES, "test")
    opened.close()


@pytest.mark.usefixtures("with_repository")
def test_a_resumed_run_has_one_value_per_step(make: Any, tmp_path: Path) -> None:
    """Killed after step 6 and restored to step 3, the series equals an uninterrupted run's to step 5."""
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
def test_a_rewound_summary_covers_the_remaining_values(make: Any, tmp_path: Path) -> None:
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
    opened = _reopen(tmp_path, state["run"])
    (names,) = opened.meta_run_tree.collect("traces").values()
    opened.close()
    wanted = {"first_step", "last_step", "first", "last", "min", "max"}
    summaries = {name: {key: summary[key] for key in wanted} for name, summary in names.items()}
    assert summaries == {
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
    machine = import_aim().sdk.lock_manager.LockManager.machine_id
    (tmp_path / ".aim" / "locks" / f"{run}.softlock").write_text(f"{machine}-1-0")
    second = make()
    second.rewind(0)
    second.track(1, {"loss": 3.0})
    second.close()
    assert _runs(tmp_path) == [run]
    assert _series(tmp_path, run) == {"loss": {1: 3.0}}


@pytest.mark.usefixtures("with_repository")
def test_a_removed_aim_run_is_recreated(make: Any, tmp_path: Path) -> None:
    """A missing run named in the saved state is made under its hash, with the following values."""
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
    container = import_aim().Repo.from_path(str(tmp_path)).request_tree("meta", run, read_only=True)
    assert container.subtree(("meta", "chunks", run))["end_time"] > 0


@pytest.mark.usefixtures("with_repository")
def test_without_a_step_there_is_no_aim_run(make: Any, tmp_path: Path) -> None:
    """A tracker closed before its first step adds nothing to the repository."""
    make().close()
    assert not (tmp_path / ".aim" / "meta" / "chunks").exists()


@pytest.mark.usefixtures("with_repository")
def test_aim_does_not_use_the_network(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection and no name lookup is attempted, and nothing but the properties is recorded."""
    attempts: list[Any] = []
    monkeypatch.setattr(socket.socket, "connect", lambda *arguments: attempts.append(arguments))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **_: attempts.append(arguments))
    tracker = make()
    tracker.rewind(0)
    tracker.track(1, {"loss": 1.0})
    tracker.close()
    assert not attempts
    opened = _reopen(tmp_path, tracker.state_dict()["run"])
    assert opened[...] == {"hparams": PROPERTIES}
    assert opened.get_terminal_logs() is None
    opened.close()


def test_a_missing_package_names_the_extra(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the command for installing it."""
    monkeypatch.setitem(sys.modules, "aim", None)
    with pytest.raises(UserError, match=r"pip install 'drawloom\[aim\]'"):
        make()


def test_another_rank_neither_loads_nor_writes(make: Any, mesh_of: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Aim need not even be installed there; state from the main rank is taken."""
    monkeypatch.setitem(sys.modules, "aim", None)
    tracker = make(mesh=mesh_of(world=SecondRank()))
    assert tracker.state_dict() == {"run": ""}
    tracker.load_state_dict({"run": "abc"})
    tracker.rewind(0)
    tracker.track(1, {"loss": 1.0})
    tracker.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("with_repository")
def test_an_error_of_aim_is_one_warning(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step refused by Aim is missing, the others are there."""
    track = import_aim().Run.track

    def refuse(self: Any, value: float, name: str, step: int, context: Any) -> None:
        if step in (2, 3):
            raise OSError("disk full")
        track(self, value, name=name, step=step, context=context)

    monkeypatch.setattr(import_aim().Run, "track", refuse)
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
    monkeypatch.setattr(import_aim().Run, "track", lambda *_, **__: gate.wait(20))
    tracker = make(queue_size=2, timeout=0.1)
    start = time.monotonic()
    for step in range(1, 100):
        tracker.track(step, {"loss": 1.0})
    tracker.close()
    assert time.monotonic() - start < 5
    assert caplog.messages == ["Aim does not keep up; some steps will be missing there"]
    gate.set()
    for thread in threading.enumerate():
        if thread.name == "Aim":
            thread.join(10)


def test_a_repository_elsewhere_is_refused(make: Any, tmp_path: Path) -> None:
    """Nothing is written through a link in a received run folder."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / ".aim").symlink_to(elsewhere)
    with pytest.raises(UserError, match="symbolic link"):
        make()
    assert not list(elsewhere.iterdir())


@pytest.mark.usefixtures("with_repository")
def test_training_and_validation_are_contexts_of_one_name(make: Any, tmp_path: Path) -> None:
    """Aim has two series `loss`, each with its context and values."""
    tracker = make()
    tracker.rewind(0)
    for phase, loss in (("train", 1.0), ("validation", 2.0)):
        tracker.track_in_context(1, {"loss": loss, "other": None}, {"phase": phase})
    tracker.close()
    opened = _reopen(tmp_path, tracker.state_dict()["run"])
    values_by_phase = {metric.context.to_dict()["phase"]: metric.values.values_list() for metric in opened.metrics()}
    opened.close()
    assert values_by_phase == {"train": [1.0], "validation": [2.0]}


def _distributions(folder: Path, run: str) -> dict[int, tuple[list[float], tuple[float, float]]]:
    """Return the only series of distributions of a run: weights and range by step."""
    opened = _reopen(folder, run)
    series = opened.get_distribution_sequence("weights/a", import_aim().storage.context.Context({}))
    steps, values = series.values.sparse_list()
    opened.close()
    return {step: (value.weights.tolist(), tuple(value.range)) for step, value in zip(steps, values, strict=True)}


@pytest.mark.usefixtures("with_repository")
def test_histograms_are_distributions_and_are_rewound(make: Any, tmp_path: Path) -> None:
    """Counts and bounds equal the tracked ones; a run resumed after step 2 has no later ones, until it writes them."""
    first = make()
    first.rewind(0)
    for step in (1, 2, 3, 4):
        first.track_distributions(step, {"weights/a": Histogram(-1.0, 1.0, (float(step), 2.0))})
    state = first.state_dict()
    first.close()
    second = make()
    second.load_state_dict(state)
    second.rewind(2)
    second.track_distributions(3, {"weights/a": Histogram(0.0, 4.0, (9.0, 9.0, 9.0))})
    second.close()
    assert _distributions(tmp_path, state["run"]) == {
        1: ([1.0, 2.0], (-1.0, 1.0)),
        2: ([2.0, 2.0], (-1.0, 1.0)),
        3: ([9.0, 9.0, 9.0], (0.0, 4.0)),
    }


@pytest.mark.usefixtures("with_repository")
def test_runs_share_a_repository(make: Any, tmp_path: Path) -> None:
    """Two run folders have one run apiece in it; one restarted without a checkpoint continues its own."""
    folders = [tmp_path / name for name in ("one", "two")]
    for number, folder in enumerate([*folders, folders[0]]):
        folder.mkdir(exist_ok=True)
        tracker = make(folder=Folder(folder), repository=str(tmp_path))
        tracker.rewind(0)
        tracker.track(1, {"loss": float(number)})
        tracker.close()
        assert not (folder / ".aim").exists()
    series = [_series(tmp_path, read_stored_run_id(folder, "aim")) for folder in folders]
    assert series == [{"loss": {1: 2.0}}, {"loss": {1: 1.0}}]
    assert len(_runs(tmp_path)) == 2


def track_on_server(folder: Path, address: str, done: int) -> tuple[list[float], Any]:
    """Track like a run killed after step 4, or resumed after step 2; return the server's values."""
    job = fake(RunInfo, name="test", seed=0, folder_path=folder)
    tracker = AimTracker(folder=Folder(folder), mesh=SingleRankMesh(), job=job, repository=address, timeout=60.0)
    tracker.open()
    tracker.store_properties(PROPERTIES)
    tracker.rewind(done)
    for step in range(done + 1, 5 - done // 2):
        tracker.track(step, {"loss": float(step - 10 * done)})
    tracker.close()
    options = {"capture_terminal_logs": False, "system_tracking_interval": None}
    run = import_aim().Run(read_stored_run_id(folder, "aim"), repo=address, **options)
    [series] = run.metrics()
    tracked = sorted(series.values.values_list()), run["hparams"]
    run.close()
    return tracked


@pytest.mark.usefixtures("with_repository")
@pytest.mark.soak  # it starts a server, which takes ten seconds
def test_a_run_on_a_server_is_continued(tmp_path: Path) -> None:
    """Values and properties arrive; a resumed run continues its run, without the later steps."""
    port = free_port()
    address, aim = f"aim://127.0.0.1:{port}", Path(sys.executable).with_name("aim")
    command = [str(aim), "server", "--repo", str(tmp_path), "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_for_server(port, seconds=120)
            for done in (0, 2):
                [tracked] = run_ranks(track_on_server, 1, tmp_path, address, done, timeout=120, variables=False)
            assert tracked == ([-17.0, 1.0, 2.0], PROPERTIES)
        finally:
            server.terminate()
