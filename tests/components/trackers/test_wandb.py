"""Metrics with Weights & Biases, offline."""

import json
import struct
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.ports.tracking import Histogram
from drawloom.components.trackers.background import import_tracker_package
from drawloom.components.trackers.wandb import WandbTracker
from drawloom.graph import UserError
from support.folders import Folder

PROPERTIES = {"run": {"name": "test", "sizes": [1, 2]}}
BLOCK, HEAD = 32768, 7


def open_tracker(folder: Path, mesh: Any, job: Any) -> WandbTracker:
    """Return a tracker as in a run's process."""
    tracker = WandbTracker(folder=Folder(folder), mesh=mesh, job=job, mode="offline", timeout=60)
    tracker.open()
    tracker.store_properties(PROPERTIES)
    return tracker


def records(path: Path) -> Iterator[Any]:
    """Return the records in a file for `wandb sync`: a LevelDB log with the package's records."""
    kinds: Any = import_module("wandb.proto.wandb_internal_pb2")  # whose types are made when it is imported
    content, offset, parts = path.read_bytes(), HEAD, b""
    while offset + HEAD <= len(content):
        if BLOCK - offset % BLOCK < HEAD:  # the rest of a block is padding
            offset += BLOCK - offset % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", content, offset)
        parts += content[offset + HEAD : offset + HEAD + size]
        offset += HEAD + size
        if kind in (1, 4):  # whole, or the last part
            yield kinds.Record.FromString(parts)
            parts = b""


@pytest.mark.soak  # the package has many behind it, and takes 5 s to import
def test_a_resumed_run_continues_the_run(tmp_path: Path, one_rank: Any, job: Any) -> None:
    """Values are there by step, in files of one run, with the properties; nothing is recorded of the machine."""
    pytest.importorskip("wandb", reason="needs the package wandb: pip install 'drawloom[wandb]'")
    first = open_tracker(tmp_path, one_rank, job)
    first.rewind(0)
    for step in (1, 2):
        first.track(step, {"loss": float(step), "norms/a.b": 0.5})
    state = first.state_dict()
    first.close()
    time.sleep(1.1)  # the package names files by the second, and a run takes longer to start again
    second = open_tracker(tmp_path, one_rank, job)
    second.load_state_dict(state)
    second.rewind(1)
    second.track(2, {"loss": -2.0})
    second.track_distributions(2, {"weights/a": Histogram(0.0, 1.0, (3.0, 4.0))})
    second.close()
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert {path.stem for path in files} == {f"run-{state['run']}"}
    run_records = [record for path in files for record in records(path)]
    rows = [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in run_records
        if record.WhichOneof("record_type") == "history"
    ]
    kept = [{key: row[key] for key in ("step", "loss", "norms/a.b") if key in row} for row in rows]
    assert kept == [
        {"step": 1, "loss": 1.0, "norms/a.b": 0.5},
        {"step": 2, "loss": 2.0, "norms/a.b": 0.5},
        {"step": 2, "loss": -2.0},
        {"step": 2},
    ]
    drawn = {key: value for key, value in rows[-1].items() if key.startswith("weights/a")}
    assert drawn == {"weights/a._type": "histogram", "weights/a.values": [3, 4], "weights/a.bins": [0.0, 0.5, 1.0]}
    runs = [record.run for record in run_records if record.WhichOneof("record_type") == "run"]
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["run"] == {"name": "test", "sizes": [1, 2]} and runs[0].project == "drawloom"
    assert not [
        record for record in run_records if record.WhichOneof("record_type") in ("stats", "output", "output_raw")
    ]


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the package to install."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install 'drawloom\[wandb\]'"):
        import_tracker_package("wandb", "wandb")
