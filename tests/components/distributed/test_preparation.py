"""Preparation of spares."""

import gc
import sys
from collections.abc import Iterator

import pytest
import torch

from drawloom.components.distributed import preparation
from drawloom.components.distributed.preparation import COMPILER, Preparation

MODULE = "zipapp"  # nothing else imports it


@pytest.fixture(autouse=True)
def _thaw() -> Iterator[None]:
    sys.modules.pop(MODULE, None)
    yield
    gc.unfreeze()


def test_modules_are_imported_unless_they_have_no_file() -> None:
    """Code makes some modules, for example for compiled functions."""
    Preparation(["made_by_code", MODULE], 10).prepare([])
    assert MODULE in sys.modules


@pytest.mark.parametrize(("modules", "compiles"), [([MODULE], False), ([COMPILER, MODULE], True)])
def test_spares_load_the_compiler_on_all_gpus_if_members_use_it(
    modules: list[str], compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spare may get any of them. Too little memory for the state does not end it."""
    gpus = [torch.device("cuda", index) for index in range(2)]
    loaded, compiled = list[torch.device](), list[torch.device]()
    monkeypatch.setattr(preparation, "load_libraries_on_gpu", loaded.append)
    monkeypatch.setattr(preparation, "compile_small_function", compiled.append)

    def fail(size: int, dtype: torch.dtype, pin_memory: bool) -> None:
        assert (size, pin_memory) == (2**40, True)
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch, "empty", fail)
    Preparation(modules, 2**40).prepare(gpus)
    assert loaded == gpus and compiled == (gpus if compiles else [])
