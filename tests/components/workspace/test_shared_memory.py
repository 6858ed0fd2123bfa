"""Shared memory without names."""

import mmap
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from drawloom.components.storage.safetensors.header import DTYPES
from drawloom.components.storage.state_tree import PackedState
from drawloom.components.workspace.shared_memory import open_shared_state, share_in_memory
from drawloom.graph import UserError

OF_OTHERS = ("sem.", "power-")
"""What tests that run at the same time have there for a moment."""


def list_segments() -> list[str]:
    """Return the segments this process has open or mapped, and all named ones."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue  # the listing's own
    mapped = Path("/proc/self/maps").read_text().splitlines()
    named = [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if not name.startswith(OF_OTHERS)]
    return named + [line.split()[-1] for line in [*links, *mapped] if "memfd:drawloom" in line]


def test_the_reader_has_the_shared_tensors() -> None:
    """Every dtype arrives, also without a number in it, and in the same memory: nothing is copied."""
    tensors = {f"t{n}": torch.randint(0, 2, (n % 3, 2)).to(dtype) for n, dtype in enumerate(DTYPES.values())}
    with share_in_memory(PackedState([1, {"a": None}], tensors)) as ticket:
        opened = open_shared_state(ticket)
    assert opened.tree == [1, {"a": None}]
    assert opened.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert opened.tensors[name].dtype == tensor.dtype
        assert torch.equal(opened.tensors[name].view(torch.uint8), tensor.view(torch.uint8))
    addresses = [tensor.data_ptr() for tensor in opened.tensors.values() if tensor.numel()]
    assert max(addresses) - min(addresses) < sum(tensor.nbytes for tensor in tensors.values()) < mmap.PAGESIZE


@pytest.mark.parametrize("count", [0, 1, 40, 1000])
def test_any_number_of_tensors_fits(count: int) -> None:
    """Sizes are known, never guessed: none, some and many small tensors fit."""
    with share_in_memory(PackedState({}, {str(n): torch.tensor([n]) for n in range(count)})) as ticket:
        opened = open_shared_state(ticket)
    assert [opened.tensors[str(n)].item() for n in range(count)] == [*range(count)]


def test_nothing_is_left() -> None:
    """When the block is over and the tensors are let go of, nothing is held or named, after an exception too."""
    before = list_segments()
    with pytest.raises(KeyError), share_in_memory(PackedState({}, {"a": torch.ones(9)})) as ticket:
        opened = open_shared_state(ticket)
        assert len(list_segments()) > len(before)
        raise KeyError
    assert opened.tensors["a"].tolist() == [1.0] * 9  # who opened it keeps it
    del opened
    assert list_segments() == before


def test_a_reader_changes_its_own_only() -> None:
    """Shared memory is sealed: no process can change another's view."""
    with share_in_memory(PackedState({}, {"a": torch.ones(2)})) as ticket:
        first, second = open_shared_state(ticket), open_shared_state(ticket)
        first.tensors["a"].zero_()
        assert second.tensors["a"].tolist() == [1.0, 1.0]
        for number in ticket["files"]:
            with pytest.raises(OSError):
                os.pwrite(number, b"x", 0)
            with pytest.raises(OSError):
                os.ftruncate(number, 1)


def test_a_killed_process_leaves_nothing() -> None:
    """The system frees a process's shared memory, even if the process was killed."""
    program = """
    import os, signal, torch
    from drawloom.components.storage.state_tree import PackedState
    from drawloom.components.workspace.shared_memory import share_in_memory
    with share_in_memory(PackedState({}, {"a": torch.ones(9)})) as ticket:
        os.kill(os.getpid(), signal.SIGKILL)
    """
    before = list_segments()
    path = str(Path(__file__).parents[3] / "src")
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env={"PYTHONPATH": path}, check=False)
    assert done.returncode == -9
    assert list_segments() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"machine": "another"}, "ranks on several machines can't share memory; give workspace_path"),
        ({"token": "00" * 16}, "shared is gone"),
        ({"process": 2**22 + 1}, "can't be opened"),
        ({"files": [9999, 9999]}, "can't be opened"),
    ],
)
def test_a_ticket_of_a_missing_segment_is_reported(changes: dict[str, Any], message: str) -> None:
    """Another machine, another process in its place, and vanished memory have their own messages."""
    with share_in_memory(PackedState({}, {})) as ticket, pytest.raises(UserError, match=message):
        open_shared_state(ticket | changes)


def test_other_systems_get_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `memfd_create`, which not all systems have, the error suggests setting workspace_path."""
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(UserError, match="give workspace_path"), share_in_memory(PackedState({}, {})):
        pytest.fail("it must not open")
