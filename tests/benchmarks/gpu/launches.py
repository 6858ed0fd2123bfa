"""
Host time of a kernel launch, with and without Triton's JIT, in one run: `make bench NAME=launches`.

A line reports one operation, forward or both ways: the host's microseconds per call in the fastest batch, for our lean
launches, for the JIT's, and without any launch. The device has so little work that the host is the limit.
"""

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu import clock
from drawloom.kernels.attention.cudnn import ONE_DOCUMENT_PER_ROW, attention_cudnn
from drawloom.kernels.cross_entropy.triton import linear_cross_entropy_triton
from drawloom.kernels.gates.triton import swiglu_triton
from drawloom.kernels.grouped_gemm.triton import grouped_gemm_triton
from drawloom.kernels.moe.triton import moe_permute_triton, moe_routes_triton, moe_unpermute_triton
from drawloom.kernels.rms_norm.triton import add_rms_norm_triton, rms_norm_triton
from drawloom.kernels.rope.triton import qk_norm_rope_triton, rope_triton
from drawloom.kernels.triton.primitives import LeanKernel

CALLS, BATCHES = 50, 20


def launch_by_jit(kernel: LeanKernel, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel by Triton's JIT."""
    kernel.jit[grid](*arguments, **constants)


def skip_launch(_kernel: LeanKernel, _grid: tuple[int, ...], *_arguments: Any, **_constants: Any) -> None:
    """Skip the launch."""


def main() -> None:
    """Print a line per operation."""
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here")
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name()}; host us a call")
    print(f"{'':<34}{'lean':>9}{'JIT':>9}{'neither':>9}")
    for name, call in operations().items():
        times = []
        for launch in (None, launch_by_jit, skip_launch):
            with mock.patch.object(LeanKernel, "_launch", launch or LeanKernel._launch):
                times.append(clock.host_seconds(call, torch.device("cuda"), BATCHES, CALLS) * 1e6)
        print(f"{name:<34}" + "".join(f"{microseconds:>9.1f}" for microseconds in times), flush=True)


def operations() -> dict[str, Callable[[], object]]:
    """Return calls by name: with gradients, or without if the name ends in `forward`."""

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()

    x, weight, gate = numbers(64, 1024), numbers(1024), numbers(64, 1536)
    q, k, head_weight = numbers(1, 64, 16, 128), numbers(1, 64, 8, 128), numbers(128)
    cos, sin = torch.rand(2, 1, 64, 64, device="cuda")
    routes = moe_routes_triton(torch.randint(8, (64, 2), device="cuda"), 8)
    shares, experts = torch.rand(64, 2, device="cuda"), numbers(8, 1024, 512)
    rows, head, targets = numbers(128, 1024), numbers(512, 1024), torch.zeros(64, dtype=torch.int64, device="cuda")
    forwards: dict[str, tuple[Callable[[], Any], list[Tensor]]] = {
        "rms_norm": (lambda: rms_norm_triton(x, weight, 1e-6), [x, weight]),
        "add_rms_norm": (lambda: add_rms_norm_triton(x, x, weight, 1e-6), [x, weight]),
        "swiglu": (lambda: swiglu_triton(gate, gate), [gate]),
        "rope": (lambda: rope_triton(q, cos, sin), [q]),
        "qk_norm_rope": (
            lambda: qk_norm_rope_triton(q, k, head_weight, head_weight, 1e-6, cos, sin),
            [q, k, head_weight],
        ),
        "attention": (lambda: attention_cudnn(q, k, k, ONE_DOCUMENT_PER_ROW), [q, k]),
        "moe_permute": (lambda: moe_permute_triton(x, shares, routes), [x]),
        "moe_unpermute": (lambda: moe_unpermute_triton(rows, routes), [rows]),
        "grouped_gemm": (lambda: grouped_gemm_triton(rows, experts, routes[2]), [rows, experts]),
        "linear_cross_entropy": (lambda: linear_cross_entropy_triton(x, head, targets)[0], [x, head]),
    }
    calls: dict[str, Callable[[], object]] = {}
    for name, (forward, learned) in forwards.items():
        results = forward()
        results = results if isinstance(results, tuple) else (results,)
        results = [result for result in results if result.requires_grad]
        grads = [torch.randn_like(result) for result in results]

        def forward_and_backward(forward: Any = forward, learned: Any = learned, grads: Any = grads) -> object:
            results = forward()
            several = results if isinstance(results, tuple) else (results,)
            return torch.autograd.grad([result for result in several if result.requires_grad], learned, grads)

        def forward_only(forward: Any = forward) -> object:
            with torch.no_grad():
                return forward()

        calls[f"{name}, forward"], calls[f"{name}, both ways"] = forward_only, forward_and_backward
    return calls


if __name__ == "__main__":
    main()
