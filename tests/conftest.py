"""
Triton's kernels run compiled where there is a GPU, and in Triton's interpreter where there is none.

Triton reads its variable once, when it is first imported, and much imports it: so it is set before any test is read.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from support import seeding  # noqa: F401 - Hypothesis is told of torch's generators

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def room() -> Iterator[None]:
    """An empty GPU, before and after a test that takes much of it; tests of one xdist_group run one after another."""
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What needs a GPU is left out where there is none."""
    if torch.cuda.is_available():
        return
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if needing:
        config.hook.pytest_deselected(items=needing)
        items[:] = [item for item in items if item not in needing]
