"""
Preparation of a hot spare while it waits, so that it computes soon after it has joined.

Measured on a CPU (torch 2.13), with compiled code in torch's cache on disk: imports for a run take a process 3 to 6 s,
and its first use of torch.compile 1.9 s, which another compiled function, however small, reduces to 0.2 s.
"""

import gc
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.attention import SDPBackend, sdpa_kernel

from drawloom.components.distributed.rng import fill_normal

COMPILER = "torch._inductor.compile_fx"


@attrs.frozen
class Preparation:
    """A member's modules, for spares to import in advance, and the bytes of its state, for which they pin memory."""

    modules: Sequence[str]
    state_bytes: int

    def prepare(self, gpus: Sequence[torch.device]) -> None:
        """Prepare this process for these GPUs, and hide all objects so far from the garbage collector."""
        for name in self.modules:
            with suppress(Exception):  # some are made by code, and can't be imported by their name
                import_module(name)
        for gpu in gpus:
            load_libraries_on_gpu(gpu)
            if COMPILER in self.modules:
                compile_small_function(gpu)
        with suppress(RuntimeError):  # if there is too little memory, it is pinned when the state comes
            # torch keeps the freed memory: pinning some GB takes a second
            torch.empty(self.state_bytes, dtype=torch.uint8, pin_memory=bool(gpus))
        gc.freeze()  # a recovery's collections would walk through the modules' million objects


@cache
def load_libraries_on_gpu(gpu: torch.device) -> None:
    """Create a CUDA context on a GPU, and load cuBLAS, cuDNN and NCCL there; this keeps about 0.6 GB of the GPU."""
    torch.cuda.set_device(gpu)
    matrix = torch.ones(1, 1, 64, 64, dtype=torch.bfloat16, device=gpu, requires_grad=True)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], set_priority=True):
        torch.autograd.backward(F.scaled_dot_product_attention(matrix @ matrix, matrix, matrix).sum())
    fill_normal(matrix.detach(), key=0, std=1.0)  # a joining rank draws weights before it receives others
    backend: Any = dist.ProcessGroupNCCL(HashStore(), 0, 1, dist.ProcessGroupNCCL.Options())
    backend.eager_connect_single_device(gpu)
    backend.shutdown()
    del matrix
    torch.cuda.empty_cache()


@cache
def compile_small_function(device: torch.device) -> None:
    """Compile a function and its backward pass, so that torch's compiler and Triton are loaded."""
    numbers = torch.ones(64, 64, device=device, requires_grad=True)
    torch.autograd.backward(torch.compile(lambda x: F.silu(x) * 2)(numbers).sum())
