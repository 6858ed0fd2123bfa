"""
Two repairs of Triton's interpreter, which has no bfloat16 and stores its bits as 16-bit integers.

It truncates float32 on the way to bfloat16, where GPUs round to the nearest even; and it multiplies matrices of
bfloat16 as if their bits were integers.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

BF16, FLOAT = tl.bfloat16, tl.float32


def round_to_bfloat16(numbers: Any) -> Any:
    """Return the bits of bfloat16 for float32, rounded to the nearest, ties to even; NaN as GPUs write it."""
    bits = numbers.view(np.uint32)
    nearest = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FFF), nearest)


def widen_bfloat16(bits: Any) -> Any:
    """Return the bits of bfloat16 as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def repair() -> None:
    """Repair both, for the rest of this process."""
    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if (source, target) == (FLOAT, BF16):
            return TensorHandle(round_to_bfloat16(np.ascontiguousarray(src.data)), BF16)
        if (source, target) == (BF16, FLOAT):
            return TensorHandle(widen_bfloat16(src.data), FLOAT)
        return cast(self, src, dst_type)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (cast_impl(self, x, FLOAT) if x.dtype.scalar == BF16 else x for x in (a, b))
        return dot(self, a, b, *rest)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = cast_impl, create_dot
