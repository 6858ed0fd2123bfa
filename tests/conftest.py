"""
Triton's kernels run compiled on a GPU, and in Triton's interpreter without one.

Triton reads its variable once, when it is first imported, and many modules import it: it is set before any test.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from support import seeding  # noqa: F401 - registers torch's generators with Hypothesis

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# No deadlines: on a busy machine any example may take long. `make soak` looks thoroughly.
settings.register_profile("plain", max_examples=30, stateful_step_count=25, deadline=None)
settings.register_profile("thorough", max_examples=400, deadline=None)
settings.load_profile("plain")


LONG_COMPONENTS = ("components/pipeline", "components/checkpoint", "components/distributed")
FIRST = ("docs", "meshes", "recipes", "runs", "soak", "plugins", *LONG_COMPONENTS, "kernels", "contracts")
"""Folders whose files take longest: workers of xdist take files in order, and short ones fill the gaps at the end."""


@pytest.fixture
def room() -> Iterator[None]:
    """An empty GPU, before and after a test that takes much of it; tests of one xdist_group run one after another."""
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a corpus and the tiny recipe."""
    from support.runs import write_corpus  # would import Triton before its variable is set

    write_corpus(tmp_path)
    return tmp_path


@pytest.fixture
def float64() -> Iterator[None]:
    """Everything is computed in float64, unless a test says otherwise."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """
    Put files that take long first, and skip those marked `gpu` where there is none. Where a test starts more ranks than
    there are GPUs, they take turns (`device.share`).
    """
    folders = [Path(__file__).parent / folder for folder in FIRST]
    places = {path: [folder not in path.parents for folder in folders] for path in {item.path for item in items}}
    items.sort(key=lambda item: places[item.path])
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_collection_finish() -> None:
    """Keep thousands of tests and the modules that they import out of every later garbage collection."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let the interpreter collect everything when it ends: some extension modules report what it leaves."""
    gc.unfreeze()
