"""Times of casts to float8 and of products of the casts, in every variant."""

import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from drawloom.kernels.float8 import E4M3, padded
from drawloom.kernels.triton import float8, tma
from drawloom.kernels.triton.float8 import TRITON, scale_and_inverse, magnitude
from drawloom.kernels.triton.primitives import cdiv

D = torch.device("cuda")
T = 8192
FLUSH = torch.empty(2**28, device=D, dtype=torch.uint8)


def ms(call: Callable[[], Any], n: int = 6) -> float:
    for _ in range(2):
        call()
    spans = []
    for _ in range(n):
        FLUSH.zero_()
        a, b = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        a.record()
        call()
        b.record()
        spans.append((a, b))
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in spans)[n // 2]


def line(name: str, call: Callable[[], Any], flops: float = 0, nbytes: float = 0) -> None:
    try:
        t = ms(call)
    except Exception as e:
        print(f"{name:<60} FAILED {type(e).__name__} {str(e)[:150]!r}", flush=True)
        return
    rate = f"{flops / t / 1e9:8.0f} TFLOP/s" if flops else f"{nbytes / t / 1e6:8.0f} GB/s"
    print(f"{name:<60}{t:8.4f} ms {rate}", flush=True)


def casts() -> None:
    from drawloom.kernels.triton.primitives import next_power_of_2, sm_count

    for width in (1024, 2048, 4096, 14336):
        x = torch.randn(T, width, device=D, dtype=torch.bfloat16)
        n = x.numel()
        data, scale = torch.empty_like(x, dtype=E4M3), torch.empty(T, device=D)
        factor, row_scale, row_factor = torch.ones(width, device=D), torch.ones(T, device=D), torch.empty(T, device=D)
        block = next_power_of_2(width)
        for rows in (1, 2, 4):
            if rows * block > 16384:
                continue
            for warps in (2, 4, 8, 16, 32):
                if not 128 <= rows * block // warps <= 2048:
                    continue
                line(
                    f"rows {width} r{rows} w{warps}",
                    lambda: float8._quantize_kernel[(cdiv(T, rows),)](
                        x,
                        None,
                        None,
                        data,
                        scale,
                        None,
                        None,
                        T,
                        width,
                        width,
                        ROWS=rows,
                        BLOCK=block,
                        num_warps=warps,
                        enable_fp_fusion=True,
                    ),
                    nbytes=3 * n,
                )
                for per in (1, 2, 4, 8, 16):
                    if per * warps > 64 or per * warps < 8:
                        continue
                    programs = min(cdiv(T, rows), per * sm_count(D))
                    line(
                        f"  persistent {width} r{rows} w{warps} p{per}",
                        lambda: float8._quantize_kernel[(programs,)](
                            x,
                            None,
                            None,
                            data,
                            scale,
                            None,
                            None,
                            T,
                            width,
                            width,
                            ROWS=rows,
                            BLOCK=block,
                            num_warps=warps,
                            enable_fp_fusion=True,
                        ),
                        nbytes=3 * n,
                    )
                    parts = torch.empty(programs, width, device=D)
                    line(
                        f"  grad {width} r{rows} w{warps} p{per}",
                        lambda: float8._quantize_kernel[(programs,)](
                            x,
                            factor,
                            row_scale,
                            data,
                            scale,
                            row_factor,
                            parts,
                            T,
                            width,
                            width,
                            ROWS=rows,
                            BLOCK=block,
                            num_warps=warps,
                            enable_fp_fusion=True,
                        ),
                        nbytes=3 * n,
                    )
        parts = torch.empty(528, width, device=D)
        for columns, per_step, warps in ((32, 64, 4), (32, 128, 4), (32, 256, 8), (16, 128, 4), (64, 64, 4)):
            line(
                f"  column scale {width} c{columns} s{per_step} w{warps}",
                lambda: float8._column_scale_kernel[(cdiv(width, columns),)](
                    parts,
                    factor,
                    factor,
                    factor,
                    528,
                    width,
                    COLUMNS=columns,
                    PARTS_PER_STEP=per_step,
                    num_warps=warps,
                    enable_fp_fusion=True,
                ),
                nbytes=parts.nbytes,
            )
        line(f"  gradient whole {width}", lambda: TRITON.quantize_gradient(x, factor, row_scale), nbytes=5 * n)


print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, flush=True)
casts()
