"""What is computed on."""

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from drawloom.components.distributed.device import ComputeDevice
from drawloom.graph import UserError


@attrs.define
class View:
    """What `constraints` see of a node."""

    settings: dict[str, Any]

    def problem(self, key: str, text: str, hint: str = "") -> str:
        """Where the problem is."""
        return key


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_auto_is_the_cpu() -> None:
    """auto takes the CPU and gloo where there is nothing better."""
    device = ComputeDevice()
    device.open()
    assert (device.device, device.backend) == (torch.device("cpu"), "gloo")
    device.close()


def test_with_a_gpu_auto_is_this_process_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto takes the GPU of the local rank, and NCCL; gloo if it is asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, value in {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert (ComputeDevice().device, ComputeDevice().backend) == (torch.device("cuda", 1), "nccl")
    assert ComputeDevice(backend="gloo").backend == "gloo"


@pytest.mark.usefixtures("no_gpu")
def test_a_gpu_that_is_not_there_is_an_error_that_offers_the_cpu() -> None:
    """cuda without a GPU fails when it opens, and says what to write."""
    with pytest.raises(UserError, match="write kind = 'cpu' or 'auto'"):
        ComputeDevice(kind="cuda").open()


def test_more_processes_than_gpus_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without a GPU of its own does not share another's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="process 0 of this machine has no GPU of its own, there are only 0"):
        ComputeDevice(kind="cuda").open()


def test_nccl_on_a_cpu_is_refused() -> None:
    """`check` finds it where both are written, and opening finds it where auto became the CPU."""
    assert list(ComputeDevice.constraints(View({"kind": "cpu", "backend": "nccl"}))) == ["backend"]  # type: ignore[arg-type,comparison-overlap]
    assert not list(ComputeDevice.constraints(View({"kind": "auto", "backend": "nccl"})))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="write backend = 'gloo'"):
        ComputeDevice(kind="cpu", backend="nccl").open()


def test_threads_are_set_and_given_back() -> None:
    """torch has as many threads as asked for while the node is open, and then its own again; a second close is none."""
    before = torch.get_num_threads()
    device = ComputeDevice(kind="cpu", threads=before + 1)
    assert torch.get_num_threads() == before
    device.open()
    assert torch.get_num_threads() == before + 1
    device.close()
    device.close()
    assert torch.get_num_threads() == before


def test_memory_is_this_process_s_peak_in_bytes() -> None:
    """It is what the kernel calls the high water mark of resident memory, to a few MB."""
    measured = ComputeDevice(kind="cpu").memory()
    status = Path("/proc/self/status").read_text()
    kernel = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    assert abs(measured - kernel) < 32e6
