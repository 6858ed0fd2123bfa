"""Cost of a 1 GiB checkpoint: training stall compared with torch's async_save, total time with raw writes."""

import hashlib
import os
import queue
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from drawloom.components.checkpoint.checkpointer import Checkpointer
from drawloom.components.checkpoint.staging.blocking import Blocking
from drawloom.components.checkpoint.staging.overlapped import Overlapped
from drawloom.components.ports.run import Step
from drawloom.components.storage.tensor_source import view_bytes
from support.checkpoints import StateNode, checkpointer
from support.dcp import begin_save

TENSORS, NUMBERS = 64, 2**22  # float32: 1 GiB
ROUNDS = 5
CHUNK = 2**22

SaveTimes = dict[str, tuple[float, float]]
"""Way of saving -> seconds of training stall, and seconds until all bytes are on disk."""


def main() -> None:
    """Print the medians of interleaved rounds."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    state = {f"weight_{number}": torch.randn(NUMBERS) for number in range(TENSORS)}
    size = sum(tensor.nbytes for tensor in state.values())
    rounds: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder, _nodes(Path(folder), state) as nodes:
        for number in range(ROUNDS + 1):
            for name, seconds in _round(Path(folder), state, nodes, number + 1).items():
                if number:  # round 0 warms up: every buffer is allocated for the first time
                    rounds.setdefault(name, []).append(seconds)
    print(
        f"{size / 1e9:.2f} GB in {TENSORS} tensors, medians of {ROUNDS} interleaved rounds, {os.cpu_count()} processors"
    )
    print(f"{'':44}{'stall':>9}{'in all':>9}")
    medians = {name: tuple(map(statistics.median, zip(*times, strict=True))) for name, times in rounds.items()}
    for name, (stall, total) in medians.items():
        print(f"{name:44}{stall:8.3f}s{total:8.3f}s")
    peer, raw = medians["torch async_save"][0], medians["raw: write, sha256 beside, fsync"][1]
    for staging in ("blocking", "overlapped"):
        stall, total = medians[f"drawloom, {staging}"]
        print(f"{staging}: stall {stall / peer:.2f} of torch async_save's, in all {total / raw:.2f} of raw")
    print(f"no staging: in all {medians['drawloom, no staging'][1] / raw:.2f} of raw")


def _round(folder: Path, state: dict[str, Any], nodes: dict[str, Checkpointer], step: int) -> SaveTimes:
    measured: SaveTimes = {}
    measured["raw: write, fsync"] = _raw(folder, state, digest=False)
    measured["raw: write, sha256 beside, fsync"] = _raw(folder, state, digest=True)
    for name, node in nodes.items():
        measured[f"drawloom, {name}"] = _ours(node, step)
    measured["torch async_save"] = _torch(folder / "torch", state)
    return measured


@contextmanager
def _nodes(folder: Path, state: dict[str, Any]) -> Iterator[dict[str, Checkpointer]]:
    stagers: dict[str, Any] = {"no staging": None, "blocking": Blocking(), "overlapped": Overlapped()}
    yield {
        name: checkpointer(folder / name, {"stages": StateNode(state)}, staging=stager, every=1, keep=100)
        for name, stager in stagers.items()
    }


def _raw(folder: Path, state: dict[str, Any], *, digest: bool) -> tuple[float, float]:
    """Write the same bytes to one file while a second thread hashes them."""
    pieces: queue.Queue[memoryview | None] = queue.Queue(4)
    digest_state = hashlib.sha256()

    def work() -> None:
        for piece in iter(pieces.get, None):
            digest_state.update(piece)

    began = time.perf_counter()
    thread = threading.Thread(target=work)
    thread.start()
    file = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT)
    for tensor in state.values():
        data = view_bytes(tensor)
        for start in range(0, len(data), CHUNK):
            if digest:
                pieces.put(data[start : start + CHUNK])
            os.write(file, data[start : start + CHUNK])
    os.fsync(file)
    os.close(file)
    pieces.put(None)
    thread.join()
    seconds = time.perf_counter() - began
    (folder / "raw").unlink()
    return seconds, seconds


def _ours(node: Checkpointer, step: int) -> tuple[float, float]:
    """Return the seconds until the state is copied, and until the checkpoint is committed."""
    began = time.perf_counter()
    node.run_phase(Step(step, 10**6))
    node.wait_until_staged()  # the worst case: no training step overlaps the copy
    stall = time.perf_counter() - began
    node._saves.wait_for_pending_save()
    seconds = time.perf_counter() - began
    shutil.rmtree(node.folder.folder / "checkpoints" / f"step-{step}")
    return stall, seconds


def _torch(folder: Path, state: dict[str, Any]) -> tuple[float, float]:
    return _time_save(lambda: begin_save(state, folder), folder)


def _time_save(begin: Callable[[], Any], folder: Path) -> tuple[float, float]:
    began = time.perf_counter()
    future = begin()
    stall = time.perf_counter() - began
    future.result()
    seconds = time.perf_counter() - began
    shutil.rmtree(folder)
    return stall, seconds
