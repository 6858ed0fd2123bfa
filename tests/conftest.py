"""
Run Triton's kernels compiled on a GPU, and in Triton's interpreter without one.

Triton reads TRITON_INTERPRET when it is first imported, and many modules import it, so it is set before any test.
"""

import atexit
import gc
import os
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from support import seeding  # noqa: F401 - registers torch's generators with Hypothesis
from support.protocol_members import find_members_once

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

find_members_once()

# No deadlines: on a busy machine any example may take long. `make soak` looks thoroughly.
settings.register_profile("plain", max_examples=30, stateful_step_count=25, deadline=None)
settings.register_profile("thorough", max_examples=400, deadline=None)
settings.load_profile("plain")

gc.disable()  # until tests are collected: collections would take a quarter of that time, and find nothing

LONG_COMPONENTS = ("components/pipeline", "components/checkpoint", "components/distributed")
FIRST = (
    "gpu",
    "docs",
    "house",
    "meshes",
    "recipes",
    "runs",
    "soak",
    "plugins",
    *LONG_COMPONENTS,
    "kernels",
    "contracts",
    "graph/test_schema.py",
)
"""Slowest folders and files. xdist's workers run files in order, so that short files fill the gaps at the end."""


def _start_fork_server() -> None:
    """Start the fork server of `run_ranks`, also if a component's processes are the first to need one."""
    from support.processes import start_fork_server  # a global import would import Triton too early

    start_fork_server()


forkserver._forkserver.ensure_running = _start_fork_server  # type: ignore[method-assign]


@pytest.fixture
def room() -> Iterator[None]:
    """Empty the GPU's cache before and after a test with large tensors. Tests of one xdist_group run one by one."""
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a corpus and the tiny recipe."""
    from support.runs import write_corpus  # a global import would import Triton too early

    write_corpus(tmp_path)
    return tmp_path


@pytest.fixture
def float64() -> Iterator[None]:
    """Compute in float64 by default."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """
    Put slow files first, and skip tests marked `gpu` without a GPU. Ranks share GPUs if there are too few
    (`device.share`).
    """
    folders = [str(Path(__file__).parent / folder) for folder in FIRST]
    ranks = {path: [not f"{path}/".startswith(f"{folder}/") for folder in folders] for path in {i.path for i in items}}
    items.sort(key=lambda item: ranks[item.path])
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_collection_finish() -> None:
    """Exclude the tests and their modules from garbage collections, and start these."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # after pytest's last collections; some extension modules report what is left
    gc.set_threshold(10_000)  # of 700, every tenth second of a test would pass in them
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def short_collections() -> Iterator[None]:
    """
    Exclude the modules and caches that a file's tests leave, such as syntax trees, from garbage collections.

    A run in a test's process collects all generations twice, which takes seconds if there are millions of objects. A
    run's end also includes all objects again.
    """
    yield
    gc.collect()
    gc.freeze()
