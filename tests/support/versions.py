"""Versions that a test needs."""

from importlib.metadata import version

import pytest


def needs_transformers(oldest: str) -> pytest.MarkDecorator:
    """Skip a test if transformers is older than `oldest`, given as "major.minor"."""
    installed = tuple(map(int, version("transformers").split(".")[:2]))
    return pytest.mark.skipif(
        installed < tuple(map(int, oldest.split("."))), reason=f"needs transformers {oldest} or newer"
    )
