"""Launches without the JIT equal the JIT's launches; no GPU is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton.language as tl

from drawloom.kernels.triton.primitives import LeanKernel, cache_launches, get_specialization_key

SUPPORT = Path(__file__).parents[2] / "support"


def without_interpreter(*words: str) -> str:
    """Run a program of tests/support in a process with Triton's compiler, and return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.check_output([sys.executable, *words], env=environment, text=True)


@pytest.mark.soak
def test_every_kernel_is_launched_as_by_the_jit() -> None:
    """Every launch after the first of its kind has the JIT's kernel, arguments and blocks."""
    actual = json.loads(without_interpreter(str(SUPPORT / "ahead_of_time.py"), "lean"))
    assert actual["wrong"] == []
    assert actual["lean"] > 4 * actual["by the JIT"] > 0


def test_kinds_distinguish_the_same_arguments_as_the_jit() -> None:
    """Integers (32, 64 and unsigned 64 bits), 1, multiples of 16, dtypes and aligned addresses are distinguished."""
    numbers = [1, 0, 16, 3, 2**31 - 1, -(2**31), 2**31, 2**31 + 1, 2**63, 2**63 + 1]
    kinds = [get_specialization_key(number) for number in numbers]
    assert kinds[1] == kinds[2] == kinds[5] and kinds[3] == kinds[4]
    assert len(set(kinds)) == 7
    assert (
        get_specialization_key(0.5) == get_specialization_key(1.5)
        and get_specialization_key(True) is True
        and get_specialization_key(None) is None
    )
    x = torch.empty(16)
    assert get_specialization_key(x) != get_specialization_key(x[1:]) and get_specialization_key(
        x
    ) == get_specialization_key(x[4:]) != get_specialization_key(x.double())


def test_the_interpreter_keeps_its_own_launch() -> None:
    """In the interpreter, the decorator returns the kernel unchanged."""

    @cache_launches()
    def kernel(x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        tl.store(x + tl.arange(0, SIZE), 1.0)

    assert isinstance(kernel, LeanKernel) == torch.cuda.is_available()


def test_positional_constants_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A positional constant would be treated as a number, so it is refused."""
    driver = SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: 0))
    monkeypatch.setattr("drawloom.kernels.triton.primitives.driver", driver)
    parameters = [SimpleNamespace(name=name, is_constexpr=name.isupper()) for name in ("x", "SIZE")]
    with pytest.raises(TypeError, match="main takes constexpr arguments by name alone"):
        LeanKernel(SimpleNamespace(params=parameters, fn=SimpleNamespace(__name__="main")))[1,](torch.ones(1), 16)
