"""Products without split-K."""

import os

import pytest

from drawloom.components.kernels.split_k import WORKSPACES, forbid_split_k


def test_workspaces_are_set_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the context cuBLAS has the least workspaces; afterwards the variables are as before, set or not."""
    first, second = WORKSPACES
    monkeypatch.setenv(first, ":4096:8")
    monkeypatch.delenv(second, raising=False)
    with pytest.raises(ZeroDivisionError), forbid_split_k():
        assert {name: os.environ[name] for name in WORKSPACES} == WORKSPACES
        raise ZeroDivisionError
    assert os.environ[first] == ":4096:8" and second not in os.environ
