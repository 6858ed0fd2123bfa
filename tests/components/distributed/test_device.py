"""The compute device."""

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from drawloom.components.distributed.device import ComputeDevice
from drawloom.graph import UserError


@attrs.define
class View:
    """The part of a NodeView that `constraints` reads."""

    settings: dict[str, Any]

    def problem(self, key: str, text: str, hint: str = "") -> str:
        """The key of the problem."""
        return key


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_auto_is_the_cpu() -> None:
    """Without a GPU, auto is the CPU and gloo."""
    device = ComputeDevice()
    device.open()
    assert (device.device, device.backend) == (torch.device("cpu"), "gloo")
    device.close()


def test_with_a_gpu_auto_is_that_of_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """With GPUs, auto is the GPU of the local rank and NCCL, or gloo if set."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, value in {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert (ComputeDevice().device, ComputeDevice().backend) == (torch.device("cuda", 1), "nccl")
    assert ComputeDevice(backend="gloo").backend == "gloo"


@pytest.mark.usefixtures("no_gpu")
def test_cuda_without_a_gpu_is_an_error() -> None:
    """Opening fails, and the message says to use the CPU."""
    with pytest.raises(UserError, match="write kind = 'cpu' or 'auto'"):
        ComputeDevice(kind="cuda").open()


def test_more_processes_than_gpus_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process never shares another's GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="process 0 of this machine has no GPU, there are only 0"):
        ComputeDevice(kind="cuda").open()


def test_nccl_on_a_cpu_is_refused() -> None:
    """`check` finds it if both are written; opening finds it if auto is the CPU."""
    assert list(ComputeDevice.constraints(View({"kind": "cpu", "backend": "nccl"}))) == ["backend"]  # type: ignore[arg-type,comparison-overlap]
    assert not list(ComputeDevice.constraints(View({"kind": "auto", "backend": "nccl"})))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="write backend = 'gloo'"):
        ComputeDevice(kind="cpu", backend="nccl").open()


def test_threads_are_set_and_restored() -> None:
    """torch has the configured number of threads while the node is open, and its own after close."""
    before = torch.get_num_threads()
    device = ComputeDevice(kind="cpu", threads=before + 1)
    assert torch.get_num_threads() == before
    device.open()
    assert torch.get_num_threads() == before + 1
    device.close()
    device.close()
    assert torch.get_num_threads() == before


def test_memory_is_the_peak_in_bytes() -> None:
    """On a CPU it is the kernel's VmHWM, to a few MB."""
    measured = ComputeDevice(kind="cpu").memory()
    status = Path("/proc/self/status").read_text()
    kernel = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    assert abs(measured - kernel) < 32e6
