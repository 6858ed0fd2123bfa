"""
What a launch costs the host, `make bench-launches-gpu`: past Triton's JIT, and by it, in one run.

A line for each operation, forwards and backwards: microseconds of the host at best of several batches of calls, in
which the device has so little to do that the host is the limit; and what the launches are of that.
"""

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu import clock
from drawloom.kernels.attention_cudnn import WHOLE_ROWS, attention_cudnn
from drawloom.kernels.triton.grouped_gemm import grouped_gemm_triton
from drawloom.kernels.triton.launch import LeanKernel
from drawloom.kernels.triton.linear_cross_entropy import linear_cross_entropy_triton
from drawloom.kernels.triton.moe_permute import moe_permute_triton, moe_unpermute_triton
from drawloom.kernels.triton.moe_routes import moe_routes_triton
from drawloom.kernels.triton.qk_norm_rope import qk_norm_rope_triton
from drawloom.kernels.triton.rms_norm import add_rms_norm_triton, rms_norm_triton
from drawloom.kernels.triton.rope import rope_triton
from drawloom.kernels.triton.swiglu import swiglu_triton

CALLS, BATCHES = 50, 20


def by_jit(kernel: LeanKernel, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """A launch as it would be without ours."""
    kernel.jit[grid](*arguments, **constants)


def nothing(_kernel: LeanKernel, _grid: tuple[int, ...], *_arguments: Any, **_constants: Any) -> None:
    """No launch."""


def main() -> None:
    """Print a line for each operation."""
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here")
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name()}; host us a call")
    print(f"{'':<34}{'lean':>9}{'JIT':>9}{'neither':>9}")
    for name, call in operations().items():
        times = []
        for how in (None, by_jit, nothing):
            with mock.patch.object(LeanKernel, "_launch", how or LeanKernel._launch):
                times.append(clock.host_seconds(call, torch.device("cuda"), BATCHES, CALLS) * 1e6)
        print(f"{name:<34}" + "".join(f"{each:>9.1f}" for each in times), flush=True)


def operations() -> dict[str, Callable[[], object]]:
    """Calls with gradients, and without for those that end in `forward`."""

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()

    x, weight, gate = numbers(64, 1024), numbers(1024), numbers(64, 1536)
    q, k, of_head = numbers(1, 64, 16, 128), numbers(1, 64, 8, 128), numbers(128)
    cos, sin = torch.rand(2, 1, 64, 64, device="cuda")
    routes = moe_routes_triton(torch.randint(8, (64, 2), device="cuda"), 8)
    shares, experts = torch.rand(64, 2, device="cuda"), numbers(8, 1024, 512)
    rows, head, targets = numbers(128, 1024), numbers(512, 1024), torch.zeros(64, dtype=torch.int64, device="cuda")
    forwards: dict[str, tuple[Callable[[], Any], list[Tensor]]] = {
        "rms_norm": (lambda: rms_norm_triton(x, weight, 1e-6), [x, weight]),
        "add_rms_norm": (lambda: add_rms_norm_triton(x, x, weight, 1e-6), [x, weight]),
        "swiglu": (lambda: swiglu_triton(gate, gate), [gate]),
        "rope": (lambda: rope_triton(q, cos, sin), [q]),
        "qk_norm_rope": (lambda: qk_norm_rope_triton(q, k, of_head, of_head, 1e-6, cos, sin), [q, k, of_head]),
        "attention": (lambda: attention_cudnn(q, k, k, WHOLE_ROWS), [q, k]),
        "moe_permute": (lambda: moe_permute_triton(x, shares, routes), [x]),
        "moe_unpermute": (lambda: moe_unpermute_triton(rows, routes), [rows]),
        "grouped_gemm": (lambda: grouped_gemm_triton(rows, experts, routes[2]), [rows, experts]),
        "linear_cross_entropy": (lambda: linear_cross_entropy_triton(x, head, targets)[0], [x, head]),
    }
    found: dict[str, Callable[[], object]] = {}
    for name, (forward, learned) in forwards.items():
        results = forward()
        results = results if isinstance(results, tuple) else (results,)
        results = [each for each in results if each.requires_grad]
        grads = [torch.randn_like(each) for each in results]

        def both(forward: Any = forward, learned: Any = learned, grads: Any = grads) -> object:
            results = forward()
            several = results if isinstance(results, tuple) else (results,)
            return torch.autograd.grad([each for each in several if each.requires_grad], learned, grads)

        def alone(forward: Any = forward) -> object:
            with torch.no_grad():
                return forward()

        found[f"{name}, forward"], found[f"{name}, both ways"] = alone, both
    return found


if __name__ == "__main__":
    main()
