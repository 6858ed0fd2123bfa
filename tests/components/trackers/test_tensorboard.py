"""Metrics in TensorBoard's event files, read by TensorBoard itself."""

import logging
import math
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.ports.tracking import Histogram
from drawloom.components.trackers.background import import_tracker_package
from drawloom.components.trackers.tensorboard import TensorBoardTracker
from drawloom.graph import UserError
from support.folders import Folder


@pytest.fixture
def make(tmp_path: Path, one_rank: Any) -> Callable[..., TensorBoardTracker]:
    """Return a function for opening a tracker, as in a run's process."""

    def make(**changes: Any) -> TensorBoardTracker:
        tracker = TensorBoardTracker(**{"folder": Folder(tmp_path), "mesh": one_rank} | changes)
        tracker.open()
        return tracker

    return make


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every metric as TensorBoard shows it: steps and values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_a_resumed_run_has_one_value_per_step(make: Any, tmp_path: Path) -> None:
    """Killed after step 6 and resumed after step 3, TensorBoard shows one value a step; NaN and None are left out."""
    first = make()
    first.rewind(0)
    for step in range(1, 7):
        first.track(step, {"loss": float(step), "norms/a.b": step, "grad_norm": math.nan, "validation_loss": None})
    first.close()
    time.sleep(1.1)  # TensorBoard reads files in the order of their names, which are of the second
    second = make()
    second.rewind(3)
    for step in (4, 5):
        second.track(step, {"loss": -float(step)})
    second.close()
    assert shown(tmp_path)["loss"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, -4.0), (5, -5.0)]
    assert shown(tmp_path)["norms/a.b"] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert shown(tmp_path).keys() == {"loss", "norms/a.b"}


def test_histograms_and_properties_are_shown(make: Any, tmp_path: Path) -> None:
    """TensorBoard reads counts and bounds of bins, and the recipe's settings as hyperparameters."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    tracker = make()
    tracker.store_properties({"optimizer": {"lr": 0.5, "betas": [0.9, 0.95]}, "run": {"name": "one"}})
    tracker.rewind(0)
    tracker.track_distributions(4, {"weights/a.b": Histogram(-1.0, 3.0, (2.0, 0.0, 5.0, 1.0))})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"histograms": 0}).Reload()
    [event] = events.Histograms("weights/a.b")
    value = event.histogram_value
    assert event.step == 4 and (value.min, value.max, value.num) == (-1.0, 3.0, 8.0)
    assert (list(value.bucket_limit), list(value.bucket)) == ([0.0, 1.0, 2.0, 3.0], [2.0, 0.0, 5.0, 1.0])
    content = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    parameters = metadata.parse_session_start_info_plugin_data(content).hparams
    assert parameters["optimizer.lr"].number_value == 0.5 and parameters["run.name"].string_value == "one"
    assert parameters["optimizer.betas"].string_value == "[0.9, 0.95]"


def test_a_hanging_or_failing_writer_neither_delays_nor_ends_a_run(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A hanging writer costs the end's waiting time, a raising one nothing; both log one warning."""
    hanging, failing = make(queue_size=2, timeout=0.1), make()
    forever = threading.Event()
    hanging._writer_class = lambda *arguments, **more: forever.wait()
    failing._writer_class = None
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING, "drawloom.trackers"):
        for tracker in (hanging, failing):
            for step in range(1, 10):
                tracker.track(step, {"loss": 1.0})
            tracker.close()
    forever.set()
    assert time.monotonic() - begin < 5
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2 and "does not keep up" in messages[0] and "TensorBoard failed" in messages[1]


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the package to install."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"pip install 'drawloom\[tensorboard\]'"):
        import_tracker_package("tensorboard", "torch.utils.tensorboard")


def test_a_folder_elsewhere_is_refused(make: Any, tmp_path: Path) -> None:
    """Nothing is written through a link in a received run folder."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "tensorboard").symlink_to(elsewhere)
    with pytest.raises(UserError, match="symbolic link"):
        make()
    assert not list(elsewhere.iterdir())
