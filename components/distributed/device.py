"""This process's device, and its communication backend."""

import os
import resource
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch

from drawloom import NodeView, Problem, UserError, between, component, internal, setting

if TYPE_CHECKING:
    from drawloom.components.distributed.torchrun import Launch

SHARED_GPU_VARIABLES = {"NCCL_HOSTID": "drawloom process {process}", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
"""
Environment variables with which libraries let several ranks use one GPU, which they otherwise refuse.

With them, NCCL treats each rank as a host of its own, and sends over sockets between ranks.
"""


SYMMETRIC_BYTES = Counter[torch.device]()
"""Bytes of symmetric memory by GPU, which torch's allocator does not count."""


@component(impact="safe")
class ComputeDevice:
    """The CPU, or one GPU per process, chosen by LOCAL_RANK."""

    kind: Literal["auto", "cpu", "cuda"] = setting("auto is cuda if torch finds a GPU, else cpu", default="auto")
    _backend: Literal["auto", "gloo", "nccl"] = setting(
        "torch.distributed backend; auto is nccl on cuda and gloo on cpu", default="auto", alias="backend"
    )
    tf32: bool = setting(
        "whether a GPU multiplies float32 in TF32: 10 bits of fraction instead of 23, sums in float32, much faster",
        default=False,
        impact="changes_training",
    )
    share: bool = setting(
        "whether processes may share a GPU if there are too few, to try out a mesh; slow", default=False
    )
    threads: int | None = setting(
        "CPU threads per operation; default: OMP_NUM_THREADS, or the usable cores divided by local processes",
        default=None,
        check=between(1, 10_001),
    )

    _restoring: ExitStack = internal(factory=ExitStack)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Yield a problem for settings that need a GPU: NCCL and TF32."""
        if node.settings["kind"] == "cpu" and node.settings["backend"] == "nccl":
            yield node.problem("backend", "'nccl' connects GPUs, and kind is 'cpu'", "write 'gloo' or 'auto'")
        if node.settings["kind"] == "cpu" and node.settings["tf32"]:
            yield node.problem("tf32", "only GPUs multiply in TF32, and kind is 'cpu'", "remove tf32")

    @cached_property
    def device(self) -> torch.device:
        """The device of this rank: `cpu`, or `cuda` with LOCAL_RANK as index, modulo the GPU count if shared."""
        kind = ("cuda" if torch.cuda.is_available() else "cpu") if self.kind == "auto" else self.kind
        if kind == "cpu":
            return torch.device("cpu")
        index = self._launch.local_rank
        return torch.device("cuda", index % torch.cuda.device_count() if self.shares_gpu else index)

    def list_versions_and_choices(self) -> dict[str, str]:
        """Return the versions of torch and CUDA, and the device."""
        kind = self.device.type
        name = torch.cuda.get_device_name(self.device) if kind == "cuda" else f"cpu, {torch.get_num_threads()} threads"
        return {"torch": torch.__version__, "cuda": str(torch.version.cuda or "none"), "name": name}

    @property
    def shares_gpu(self) -> bool:
        """Whether this machine has GPUs, but fewer than processes, and the recipe lets them share."""
        return self.share and 0 < torch.cuda.device_count() < self._launch.local_world_size

    @property
    def _launch(self) -> "Launch":
        from drawloom.components.distributed.torchrun import read_launch

        return read_launch()

    @property
    def backend(self) -> str:
        if self._backend != "auto":
            return self._backend
        return "nccl" if self.device.type == "cuda" else "gloo"

    def check_before_open(self) -> None:
        """Raise UserError if the settings require a GPU for this process and there is none, or for an unknown torch."""
        from drawloom.components.distributed.torch_release import check_torch_has_private_names

        check_torch_has_private_names()
        if self.kind == "cuda" and not torch.cuda.is_available():
            raise UserError("kind: the device is 'cuda', but torch finds no GPU here; write kind = 'cpu' or 'auto'")
        if self.device.type == "cpu" and self.backend == "nccl":
            raise UserError("backend: 'nccl' connects GPUs, and torch finds none here; write backend = 'gloo'")
        if self.device.type == "cuda" and self.device.index >= (count := torch.cuda.device_count()):
            raise UserError(
                f"kind: process {self.device.index} of this machine has no GPU, there are only {count}; start as many "
                "processes as there are GPUs, or write share = true or kind = 'cpu'"
            )

    def open(self) -> None:
        """Set torch's thread count, and make the device current, unless this process may wait for one as a spare."""
        if not self._launch.spares:
            self.make_current()
        from drawloom.components.distributed.cpu_threads import THREADS, count_threads_per_process

        threads = self.threads
        if threads is None and THREADS not in os.environ:
            # torch's default is the number of physical cores, regardless of the quota and other processes
            threads = min(torch.get_num_threads(), count_threads_per_process(self._launch.local_world_size))
        if threads is not None:
            self._restoring.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(threads)

    def make_current(self) -> None:
        """Make the device torch's current device, and set torch's product precision (TF32). May be called twice."""
        vars(self).pop("device", None)  # a spare's LOCAL_RANK has changed
        if self.device.type == "cuda":
            if self.shares_gpu:
                # Set variables by which libraries let ranks share a GPU, until `close`
                self._restoring.callback(_set_variables, {name: os.environ.get(name) for name in SHARED_GPU_VARIABLES})
                process = f"{os.getpid()} on {socket.gethostname()}"
                _set_variables({name: value.format(process=process) for name, value in SHARED_GPU_VARIABLES.items()})
            self._restoring.callback(torch.cuda.set_device, torch.cuda.current_device())
            torch.cuda.set_device(self.device)
            # "high" is TF32 for torch's products, flex attention, and kernels/triton, which read torch's setting.
            self._restoring.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
            # autograd's thread for the device binds no CUDA context by itself, and cuBLAS warns of it (torch 2.11)
            torch.autograd.backward(2 * torch.ones((), device=self.device, requires_grad=True))

    def close(self) -> None:
        """Restore torch's number of threads, current GPU and float32 precision, and libraries' variables."""
        self._restoring.close()

    def get_peak_memory_so_far(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) + SYMMETRIC_BYTES[self.device]
        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _set_variables(values: Mapping[str, str | None]) -> None:
    """Set environment variables; None unsets one."""
    for name, value in values.items():
        os.environ.pop(name, None)
        os.environ |= {} if value is None else {name: value}
