"""
Operations for all Triton kernels: launch parameters, float32 matmuls, partial sums, rounding.

Compiled kernels are launched without Triton's JIT in Python, which binds and describes all arguments every time. A
compiled kernel is looked up by the JIT's own properties: a tensor's dtype and whether its address is divisible by 16; a
tensor descriptor's dtype and block; whether an integer is 1, is divisible by 16, and fits 32 bits; and all other
arguments' values. The JIT does the first launch of every kind. It does all launches in the interpreter, and on AMD's
GPUs, where it uses more properties.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from drawloom.kernels.stochastic_rounding.eager import PHILOX_MULTIPLIERS, PHILOX_ROUNDS, PHILOX_WEYL


def cache_launches(*varying: str) -> Callable[[Any], Any]:
    """
    Return a decorator for kernels, which are launched as `triton.jit`'s, by `kernel[grid](*arguments, **constants)`.

    A kernel is compiled once for all values of `varying` arguments. `constexpr` arguments and compiler options must be
    passed by name, all other arguments by position. Multiplications and additions are fused unless `enable_fp_fusion`
    is False.
    """

    def compile_kernel(function: Any) -> Any:
        kernel = triton.jit(function, do_not_specialize=varying)
        return LeanKernel(kernel) if isinstance(kernel, JITFunction) and torch.version.hip is None else kernel

    return compile_kernel


def limit_registers(count: int) -> dict[str, int]:
    """Return the launch option that limits a thread's registers, so that more programs run at once; AMD has none."""
    return {"maxnreg": count} if torch.version.hip is None else {}


class LeanKernel:
    """Kernel with the compiled functions by argument kind."""

    __slots__ = ("_compiled", "jit")

    def __init__(self, jit: Any) -> None:
        self.jit = jit
        self._compiled: dict[tuple[Any, ...], tuple[Any, Any, Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._launch, grid, enable_fp_fusion=True)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        device = driver.active.get_current_device()
        key = (device, *map(get_specialization_key, arguments), *constants, *constants.values())
        compiled = self._compiled.get(key)
        if compiled is None:
            self._launch_by_jit_and_cache(key, grid, arguments, constants)
            return
        run, function, metadata, rest = compiled
        across = grid[1] if len(grid) > 1 else 1
        stream = driver.active.get_current_stream(device)
        # The three Nones stand for metadata and hooks of Triton's profiler.
        run(grid[0], across, 1, stream, function, metadata, None, None, None, *arguments, *rest)

    def _launch_by_jit_and_cache(
        self, key: tuple[Any, ...], grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        """Launch with the JIT, and remember the compiled function."""
        parameters = self.jit.params
        if any(parameter.is_constexpr for parameter in parameters[: len(arguments)]):
            raise TypeError(f"{self.jit.fn.__name__} takes constexpr arguments by name alone")
        launched = self.jit[grid](*arguments, **constants)
        if hasattr(launched, "packed_metadata"):
            rest = tuple(constants.get(parameter.name, parameter.default) for parameter in parameters[len(arguments) :])
            self._compiled[key] = launched.run, launched.function, launched.packed_metadata, rest


def get_specialization_key(argument: Any) -> Any:
    """Return an argument's properties that need separate compiled kernels."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() & 15 == 0
    if type(argument) is int:
        if argument == 1:
            return 1
        width = 32 if -(2**31) <= argument < 2**31 else 64 if argument < 2**63 else 65
        return width, argument & 15 == 0
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, *argument.block_shape
    return float if type(argument) is float else argument


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the Triton kernels accept; they compute in float32."""


def check_floats(name: str, *tensors: Tensor) -> None:
    """Raise TypeError for a tensor (any shape) whose dtype the kernel does not accept."""
    for tensor in tensors:
        if tensor.dtype not in FLOATS:
            raise TypeError(
                f"{name} takes float32, bfloat16 or float16, not {tensor.dtype}; use the eager implementation"
            )


def view_as_rows(x: Tensor) -> Tensor:
    """Return x (..., width) as (rows, width) with last stride 1: a view if the strides allow it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def contiguous_last_dim(x: Tensor) -> Tensor:
    """Return x (any shape) if its last stride is 1, else a contiguous copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def unify_angle_strides(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """
    Return cos and sin (rows, length, pairs) with equal strides and last stride 1, since kernels accept one set of
    strides.
    """
    cos, sin = contiguous_last_dim(cos), contiguous_last_dim(sin)
    return (cos, sin) if cos.stride() == sin.stride() else (cos.contiguous(), sin.contiguous())


@cache
def sm_count(device: torch.device) -> int:
    """Return a GPU's number of streaming multiprocessors; 4 for a CPU, where the interpreter runs in sequence."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def has_large_shared_memory(device: torch.device) -> bool:
    """Return whether a GPU's programs have 227 KiB shared memory, as on Hopper and data centers' Blackwell."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device)[0] in (9, 10)


def upload(numbers: Tensor, device: torch.device) -> Tensor:
    """
    Copy a tensor (any shape and dtype) from the host to a device, without blocking the host.

    A copy to a GPU blocks unless it is from pinned memory. A tensor on the device already is returned as it is.
    """
    on_host = numbers.device.type == "cpu" != device.type
    return numbers.pin_memory().to(device, non_blocking=True) if on_host else numbers


def get_dot_precision() -> str:
    """Return how tl.dot multiplies float32: "tf32" if torch does, else "ieee"; narrower dtypes ignore it."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def cdiv(number: int, size: int) -> int:
    """Return number / size, rounded up; triton.cdiv takes 1.5 us on the host."""
    return -(-number // size)


def next_power_of_2(number: int) -> int:
    """Return the least power of two not below a positive number."""
    return 1 << (number - 1).bit_length()


def choose_tile_warp_count(elements: int) -> int:
    """Return the warps for 16 elements per thread: two loads of 16 bytes in half precision, to hide latency."""
    return max(1, min(elements // 512, 32))


def addmm_fp32(summed: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to summed, float32 (rows, columns): a (rows, inner) and b (inner, columns) with one dtype."""
    # torch's products have no out_dtype on CPUs.
    if summed.is_cuda and a.dtype != torch.float32:
        torch.addmm(summed, a, b, out_dtype=torch.float32, out=summed)
    else:
        summed.addmm_(a.float(), b.float())


def bmm_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in float32: a (batch, rows, inner) and b (batch, inner, columns) with one dtype."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


BLOCK, PARTS_PER_STEP = 32, 64
"""Columns that a program sums, 128 bytes of float32 (a cache line), and partial results that it loads at a time."""


def sum_partials(parts: Tensor, result: Tensor) -> None:
    """Sum parts, float32 (count, width), over the first dimension into `result`, with `width` elements."""
    count, width = parts.shape
    _sum_partials_kernel[(cdiv(width, BLOCK),)](parts, result, count, width, BLOCK=BLOCK, PARTS_PER_STEP=PARTS_PER_STEP)


@cache_launches("count")
def _sum_partials_kernel(parts, result, count, width, BLOCK: constexpr, PARTS_PER_STEP: constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((PARTS_PER_STEP, BLOCK), tl.float32)
    for first in range(0, count, PARTS_PER_STEP):
        part = first + tl.arange(0, PARTS_PER_STEP)
        inside = mask_tile(part < count, column < width)
        total += load_or_zero(parts + part.to(tl.int64)[:, None] * width + column[None, :], inside)
    tl.store(result + column, tl.sum(total, 0), mask=column < width)


@triton.jit
def mask_tile(rows, columns):
    """Return a tile's elements in chosen rows and columns."""
    return rows[:, None] & columns[None, :]


@triton.jit
def load_or_zero(pointers, mask):
    """Load numbers; 0 outside the mask, if there is one."""
    return tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load_float32(pointers, mask):
    """Load numbers in float32; 0 outside the mask."""
    return load_or_zero(pointers, mask).to(tl.float32)


ROUNDS, MULTIPLIERS, WEYL = (constexpr(constants) for constants in (PHILOX_ROUNDS, PHILOX_MULTIPLIERS, PHILOX_WEYL))


@triton.jit
def philox(key, draw, counter):
    """Return four words with 32 random bits per draw (int64); key and counter have any integer types."""
    # Triton chooses a scalar's type by its value, and its interpreter stores 2^31 to 2^32 - 1, which it calls int64, in
    # 32 bits; a shift by 32 would then not return the upper half, which is zero.
    key, counter = tl.cast(key, tl.uint64), tl.cast(counter, tl.uint64)
    a, b = draw.to(tl.uint32), (draw >> 32).to(tl.uint32)
    c, d = a * 0 + counter.to(tl.uint32), a * 0 + (counter >> 32).to(tl.uint32)
    first, second = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        # One multiplication returns both halves; tl.philox needs two.
        product, other = a.to(tl.uint64) * MULTIPLIERS[0], c.to(tl.uint64) * MULTIPLIERS[1]
        a, c = (other >> 32).to(tl.uint32) ^ b ^ first, (product >> 32).to(tl.uint32) ^ d ^ second
        b, d = other.to(tl.uint32), product.to(tl.uint32)
        first, second = first + WEYL[0], second + WEYL[1]
    return a, b, c, d


@triton.jit
def split_into_16bit_halves(word):
    """Return the lower and the upper 16 bits of n words, as 2 n numbers."""
    return tl.interleave(word & 0xFFFF, word >> 16)


@triton.jit
def round_stochastically(x, noise):
    """Round float32 to bfloat16 stochastically, with 16 noise bits per element."""
    # NaN is truncated and made quiet by 0x40: with noise, its bits could overflow into the sign.
    bits = x.to(tl.uint32, bitcast=True)
    rounded = tl.where(x != x, (bits >> 16) | 0x40, (bits + noise) >> 16)
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
