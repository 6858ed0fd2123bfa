"""The compute device."""

import os
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from drawloom.components.distributed import cpu_threads
from drawloom.components.distributed.device import ComputeDevice
from drawloom.graph import UserError
from drawloom.kernels.triton.primitives import get_dot_precision


@attrs.define
class View:
    """The NodeView members read by `constraints`."""

    settings: dict[str, Any]

    def problem(self, key: str, text: str, hint: str = "") -> str:
        """Return the key of the problem."""
        return key


def refused_settings(**settings: Any) -> list[Any]:
    """Return the settings refused by `check`."""
    view: Any = View({"kind": "auto", "backend": "auto", "tf32": False, **settings})
    return list(ComputeDevice.constraints(view))


def patch_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Pretend that this many GPUs can be seen and opened, on any machine."""
    for answer, function in ((True, "is_available"), (count, "device_count"), (0, "current_device")):
        monkeypatch.setattr(torch.cuda, function, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.autograd, "backward", lambda _: None)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: 1.0)


def patch_launch(monkeypatch: pytest.MonkeyPatch, **variables: int) -> None:
    """torchrun's variables."""
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))


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


def test_auto_is_the_gpu_of_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """With GPUs, auto is the GPU of the local rank and NCCL, or gloo if set."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    patch_launch(monkeypatch, RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4)
    assert (ComputeDevice().device, ComputeDevice().backend) == (torch.device("cuda", 1), "nccl")
    assert ComputeDevice(backend="gloo").backend == "gloo"


@pytest.mark.usefixtures("no_gpu")
def test_cuda_without_a_gpu_is_an_error() -> None:
    """The message says to use the CPU."""
    with pytest.raises(UserError, match="write kind = 'cpu' or 'auto'"):
        ComputeDevice(kind="cuda").check_before_open()


def test_more_processes_than_gpus_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process shares another's GPU only if the recipe says so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match=r"process 0 of this machine has no GPU, there are only 0; .* share = true"):
        ComputeDevice(kind="cuda").check_before_open()


@pytest.mark.parametrize(("gpus", "index", "host"), [(2, 1, "drawloom process"), (4, 3, "mine")])
def test_ranks_take_turns_on_too_few_gpus(gpus: int, index: int, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes them for hosts while the device is open, but not if all have GPUs of their own."""
    patch_gpus(monkeypatch, gpus)
    patch_launch(monkeypatch, RANK=5, WORLD_SIZE=8, LOCAL_RANK=3, LOCAL_WORLD_SIZE=4)
    monkeypatch.setenv("NCCL_HOSTID", "mine")
    device = ComputeDevice(kind="cuda", share=True)
    device.open()
    assert device.device.index == index and os.environ["NCCL_HOSTID"].startswith(host)
    device.close()
    assert os.environ["NCCL_HOSTID"] == "mine" and "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES" not in os.environ


def test_a_spare_uses_no_gpu_before_it_has_a_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first LOCAL_RANK is a live process's; other reads before it joins don't fix the device."""
    patch_gpus(monkeypatch, 4)
    patch_launch(monkeypatch, RANK=2, WORLD_SIZE=4, LOCAL_RANK=2, LOCAL_WORLD_SIZE=4, DRAWLOOM_SPARES=1)
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    device = ComputeDevice(kind="cuda")
    device.check_before_open()
    device.open()
    assert device.device.index == 2 and not used
    monkeypatch.setenv("LOCAL_RANK", "1")
    device.make_current()
    assert used == [device.device] == [torch.device("cuda", 1)]
    device.make_current()  # as in a launch without spares, where `open` has done it
    device.close()
    assert used[1:] == [device.device, 0, 0]  # torch's current GPU was 0 at both calls


@pytest.mark.usefixtures("no_gpu")
def test_nccl_on_a_cpu_is_refused() -> None:
    """`check` finds it on any machine if both are written, and on one without a GPU if auto is the CPU."""
    assert refused_settings(kind="cpu", backend="nccl") == ["backend"]
    assert not refused_settings(kind="auto", backend="nccl")
    with pytest.raises(UserError, match="write backend = 'gloo'"):
        ComputeDevice(kind="auto", backend="nccl").check_before_open()


def test_tf32_on_a_cpu_is_refused() -> None:
    """If the recipe's device is a CPU, tf32 is a problem; a recipe for any device may set it."""
    assert refused_settings(kind="cpu", tf32=True) == ["tf32"] and not refused_settings(kind="auto", tf32=True)


@pytest.mark.parametrize(("tf32", "name"), [(False, "ieee"), (True, "tf32")])
def test_float32_products_are_set_and_restored(tf32: bool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU torch's products and ours are by TF32 if the recipe says so, whatever they were before."""
    patch_gpus(monkeypatch, 1)
    device = ComputeDevice(kind="cuda", tf32=tf32)
    for before in ("highest", "high"):
        torch.set_float32_matmul_precision(before)
        try:
            device.open()
            assert torch.backends.cuda.matmul.allow_tf32 is tf32 and get_dot_precision() == name
            device.close()
            assert torch.get_float32_matmul_precision() == before
        finally:
            torch.set_float32_matmul_precision("highest")


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


@pytest.mark.parametrize(("variable", "processes", "threads"), [("3", 2, 6), (None, 1, 6), (None, 2, 4), (None, 8, 1)])
def test_threads_are_the_cores_divided_by_the_processes(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, processes: int, threads: int
) -> None:
    """Threads do not exceed torch's own number, and OMP_NUM_THREADS, already read by torch, takes precedence."""
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    monkeypatch.setattr(cpu_threads, "count_usable_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": f"{processes}", "LOCAL_WORLD_SIZE": f"{processes}"}
    for name, value in {**ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    device = ComputeDevice(kind="cpu")
    device.open()
    assert torch.get_num_threads() == threads
    device.close()
    assert torch.get_num_threads() == 6
    torch.set_num_threads(before)


def test_memory_is_the_peak_in_bytes() -> None:
    """On a CPU it is the kernel's VmHWM, to a few MB."""
    measured = ComputeDevice(kind="cpu").get_peak_memory_so_far()
    status = Path("/proc/self/status").read_text()
    kernel = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    assert abs(measured - kernel) < 32e6
