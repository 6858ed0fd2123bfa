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
        a.record(); call(); b.record()
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


@triton.jit
def both_kernel(x, data, scale, transposed, count, width, stride, padded_count, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    most = tl.zeros((ROWS,), tl.float32)
    for first in tl.range(0, width, COLUMNS, num_stages=STAGES):
        column = first + tl.arange(0, COLUMNS)
        inside = (row < count)[:, None] & (column < width)[None, :]
        v = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.max(magnitude(v), 1))
    s, inverse = scale_and_inverse(most)
    tl.store(scale + row, s, mask=row < count)
    for first in tl.range(0, width, COLUMNS, num_stages=STAGES):
        column = first + tl.arange(0, COLUMNS)
        inside = (row < count)[:, None] & (column < width)[None, :]
        v = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        q = (v * inverse[:, None]).to(data.dtype.element_ty)
        tl.store(data + row[:, None] * width + column[None, :], q, mask=inside)
        at = transposed + column.to(tl.int64)[:, None] * padded_count + row[None, :]
        tl.store(at, tl.trans(q), mask=(column < width)[:, None] & (row < padded_count)[None, :])


def casts() -> None:
    for width in (1024, 4096, 14336):
        x = torch.randn(T, width, device=D, dtype=torch.bfloat16)
        n = x.numel()
        q = TRITON.quantize(x, False)
        line(f"cast by rows {width}", lambda: TRITON.quantize(x, False), nbytes=3 * n)
        for tokens, channels, warps in ((128, 64, 4), (64, 64, 4), (128, 128, 4), (128, 128, 8), (64, 128, 4), (256, 64, 8), (128, 32, 4), (64, 64, 8)):
            out = torch.empty(width, T, device=D, dtype=E4M3)
            def go(source: Any = q.data, rs: Any = None, rf: Any = None, cf: Any = None) -> None:
                float8._transpose_kernel[(cdiv(T, tokens) * cdiv(width, channels),)](source, out, rs, rf, cf, T, width, width, T, TOKENS=tokens, CHANNELS=channels, num_warps=warps, enable_fp_fusion=True)
            line(f"  transpose bytes {width} {tokens}x{channels} w{warps}", go, nbytes=2 * n)
            line(f"  transpose bf16 {width} {tokens}x{channels} w{warps}", lambda: go(x, q.scale), nbytes=3 * n)
            cf = torch.ones(width, device=D)
            line(f"  transpose shifted {width} {tokens}x{channels} w{warps}", lambda: go(q.data, None, q.scale, cf), nbytes=2 * n)
        for rows, columns, warps, stages in ((16, 128, 4, 2), (32, 128, 4, 2), (32, 256, 8, 2), (64, 128, 8, 2), (32, 128, 4, 3), (32, 64, 4, 3)):
            d, s, t = torch.empty_like(x, dtype=E4M3), torch.empty(T, device=D), torch.empty(width, T, device=D, dtype=E4M3)
            line(f"  both {width} {rows}x{columns} w{warps} s{stages}", lambda: both_kernel[(cdiv(T, rows),)](x, d, s, t, T, width, width, T, ROWS=rows, COLUMNS=columns, STAGES=stages, num_warps=warps), nbytes=4 * n)
        factor = torch.ones(width, device=D)
        line(f"  gradient whole {width}", lambda: TRITON.quantize_gradient(x, factor, q.scale), nbytes=5 * n)
        line(f"  gradient rows only {width}", lambda: TRITON.quantize_gradient(x, factor, None), nbytes=3 * n)


def products() -> None:
    for n, k in ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)):
        flops = 2 * T * n * k
        x, w, g = (torch.randn(*s, device=D, dtype=torch.bfloat16) for s in ((T, k), (n, k), (T, n)))
        line(f"bf16 F N{n} K{k}", lambda: x @ w.t(), flops)
        line("  bf16 dX", lambda: g @ w, flops)
        line("  bf16 dW", lambda: g.t() @ x, flops)
        total = torch.zeros(n, k, device=D)
        line("  bf16 dW added to f32", lambda: torch.addmm(total, g.t(), x, out_dtype=torch.float32, out=total), flops)
        for name, a, b in (("F", x, w), ("dX", g, w.t().contiguous()), ("dW", g.t().contiguous(), x.t().contiguous())):
            qa, qb = TRITON.quantize(a, False), TRITON.quantize(b, False)
            one = torch.ones((), device=D)
            for fast in (True, False):
                line(f"  fp8 {name} rows fast={fast}", lambda: TRITON.multiply(qa.data, qa.scale, qb.data, qb.scale, fast), flops)
                line(f"  fp8 {name} tensor fast={fast}", lambda: torch._scaled_mm(qa.data, qb.data.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast), flops)
            exact = (qa.data[:512].double() @ qb.data[:512].double().t()) * qa.scale[:512, None] * qb.scale[None, :512]
            for fast in (True, False):
                y = TRITON.multiply(qa.data, qa.scale, qb.data, qb.scale, fast)[:512, :512].double()
                print(f"    error fast={fast}: {((y - exact).norm() / exact.norm()).item():.2e}")
        line("  fp8 dW tensor fast=False f32 out", lambda: torch._scaled_mm(qa.data, qb.data.t(), one, one, out_dtype=torch.float32, use_fast_accum=False), flops)
        line("  fp8 dW rows, add_ to f32", lambda: total.add_(TRITON.multiply(qa.data, qa.scale, qb.data, None, False)), flops)
        for h, wd, st, warps, stages, promotion in ((128, 128, 128, 8, 4, 128), (128, 128, 128, 4, 4, 128), (128, 256, 128, 8, 3, 128), (128, 256, 128, 8, 3, 2**30), (128, 128, 128, 4, 3, 2**30), (128, 128, 128, 8, 4, 2**30), (256, 128, 128, 8, 3, 128), (64, 256, 128, 4, 4, 128), (128, 128, 64, 8, 5, 128), (128, 256, 64, 8, 4, 128), (128, 128, 256, 8, 2, 128)):
            def go() -> None:
                float8._product_kernel[(cdiv(n, h) * cdiv(k, wd),)](tma.blocks(qa.data, h, st), tma.blocks(qb.data, wd, st), qa.scale, total, n, k, T, HEIGHT=h, WIDTH=wd, STEP=st, GROUP=8, STAGES=stages, PROMOTION=promotion, num_warps=warps, enable_fp_fusion=True)
            line(f"  triton dW += f32 {h}x{wd}x{st} w{warps} s{stages} p{promotion}", go, flops)
        total.zero_()
        TRITON.add_product(total, qa.data, qa.scale, qb.data)
        exact = (qa.data[:512].double() @ qb.data[:512].double().t()) * qa.scale[:512, None]
        print(f"    error of the triton product: {((total[:512, :512].double() - exact).norm() / exact.norm()).item():.2e}")


print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, flush=True)
casts()
products()
