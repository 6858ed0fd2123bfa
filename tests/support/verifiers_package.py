"""The package `verifiers`, or a stand-in for it, and environments for both."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest

STAND_IN = Path(__file__).with_name("verifiers_stand_in")
ENVIRONMENTS = Path(__file__).with_name("verifiers_environments")
PACKAGES = [
    "stand-in",
    pytest.param(
        "verifiers",
        marks=pytest.mark.skipif(
            find_spec("verifiers") is None, reason="needs the package verifiers: pip install 'drawloom[verifiers]'"
        ),
    ),
]
"""Values of a parameter for `importable`."""


@contextmanager
def importable(package: str) -> Iterator[None]:
    """Let processes import the package, or its stand-in, and the environments."""
    added = [*[str(STAND_IN)] * (package == "stand-in"), str(ENVIRONMENTS)]
    with patch.object(sys, "path", [*added, *sys.path]):
        yield
