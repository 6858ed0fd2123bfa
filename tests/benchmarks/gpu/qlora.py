"""
Training steps with LoRA on frozen weights in bfloat16 and in quantized formats, on one GPU: `make bench NAME=qlora`.

First the time to dequantize one large weight, then steps with the shape of Llama 3 8B and LoRA of rank 16 on all
projections, with the peak memory and, relative to bfloat16, the speed, with products in bfloat16 and in float8.
"""

import sys
from itertools import product
from typing import Any

import torch

from benchmarks.gpu.float8 import FORMATS as FORMATS_OF_PRODUCTS
from benchmarks.gpu.float8 import measure_case
from benchmarks.gpu.meshes import LARGE, QWEN_30B, TINY, Case
from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.kernels.weight_formats.eager import FORMATS

FROZEN = ("compute", "mxfp4") if TINY else ("compute", "nf4", "float8", "mxfp4")
SHAPE = (14_336, 4096)
REPEATS = 20


def main() -> None:
    """Measure the formats named on the command line, or all, after bfloat16; or with "experts" Qwen3-30B-A3B alone."""
    device = ComputeDevice(kind="cpu" if TINY else "cuda")
    device.open()
    processes = TorchProcesses(device=device)
    processes.open()
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    chosen = [name for name in FROZEN if not words or name in words]
    try:
        if device.device.type == "cuda":
            for name in FORMATS:
                _measure_dequantization(name, device.device)
        mesh = RankMesh(processes=processes, data_replicate=1)
        mesh.open()
        speeds: dict[tuple[str, str], float] = {}
        if "experts" in words:
            measure_case(
                Case(QWEN_30B, 1, 1, lora=True, frozen="mxfp4" if TINY else "nf4", recompute="blocks"), mesh, device
            )
            return
        for name, float8 in product(dict.fromkeys(["compute", *chosen]), FORMATS_OF_PRODUCTS):
            case = Case(LARGE, 2, 1, lora=True, frozen=name, float8=float8)
            speeds[name, float8] = measure_case(case, mesh, device)
        for (stored, multiplied), speed in speeds.items():
            text = f"{speed / speeds['compute', 'compute']:.3f} times the speed of bfloat16"
            print(f"{stored:<10}products in {multiplied:<10}{text}", flush=True)
    finally:
        processes.close()


def _measure_dequantization(name: str, device: torch.device) -> None:
    """Print the time and the rate of one launch."""
    from drawloom.kernels.weight_formats.triton import dequantize_triton

    stored = FORMATS[name].quantize(torch.randn(SHAPE, device=device))
    result = dequantize_triton(stored, name)
    begin: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(REPEATS):
        dequantize_triton(stored, name)
    end.record()
    torch.cuda.synchronize(device)
    seconds = begin.elapsed_time(end) / 1e3 / REPEATS
    rate = (stored.nbytes + result.nbytes) / seconds / 1e12
    print(f"dequantize {name:<8}{SHAPE[0]} x {SHAPE[1]}: {seconds * 1e6:.0f} us, {rate:.2f} TB/s", flush=True)


if __name__ == "__main__":
    main()
