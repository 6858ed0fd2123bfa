"""
Triton's kernels run compiled where there is a GPU, and in Triton's interpreter where there is none.

Triton reads its variable once, when it is first imported, and much imports it: so it is set before any test is read.
"""

import os

import pytest
import torch

from support import seeding  # noqa: F401 - Hypothesis is told of torch's generators

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What needs a GPU is left out where there is none."""
    if torch.cuda.is_available():
        return
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if needing:
        config.hook.pytest_deselected(items=needing)
        items[:] = [item for item in items if item not in needing]
