"""
Repairs of Triton's interpreter, which stores bfloat16 and float8 as integers with the same bits.

It truncates float32 to bfloat16, where GPUs round to the nearest even, multiplies matrices of bfloat16 as if their bits
were integers, and drops the carry when it rounds float32 to float8 (triton#8322).

It is also slow: it searches the language for parts to patch whenever a kernel calls a function, makes a table of
dtypes for every operation, describes every tensor's shape anew, and computes the overflow of integers for an assertion
that it leaves out without `debug`.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle, interpreter_builder

BF16, FLOAT, E4M3 = tl.bfloat16, tl.float32, tl.float8e4nv


def round_to_bfloat16(numbers: Any) -> Any:
    """Return the bits of bfloat16 for float32, rounded to the nearest, ties to even; NaN as GPUs write it."""
    bits = numbers.view(np.uint32)
    nearest = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FFF), nearest)


def widen_bfloat16(bits: Any) -> Any:
    """Return the bits of bfloat16 as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def repair() -> None:
    """Replace the wrong conversions and products for the rest of this process."""
    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot
    convert = InterpreterBuilder.create_fp_to_fp

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if (source, target) == (FLOAT, BF16):
            return TensorHandle(round_to_bfloat16(np.ascontiguousarray(src.data)), BF16)
        if (source, target) == (BF16, FLOAT):
            return TensorHandle(widen_bfloat16(src.data), FLOAT)
        return cast(self, src, dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) != (FLOAT, E4M3):
            return convert(self, src, dst_type, rounding_mode)
        data = torch.from_numpy(np.ascontiguousarray(src.data)).to(torch.float8_e4m3fn)
        return TensorHandle(data.view(torch.uint8).numpy(), E4M3)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (cast_impl(self, x, FLOAT) if x.dtype.scalar == BF16 else x for x in (a, b))
        return dot(self, a, b, *rest)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = cast_impl, create_dot
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    _patch_languages_once()
    _describe_shapes_once()
    options = interpreter_builder.options
    interpreter_builder.options = replace(options, sanitize_overflow=options.debug)
    number_dtype = lru_cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: (
        np.dtype(np.uint64) if dtype.scalar.is_ptr() else number_dtype(dtype.scalar)
    )


def _patch_languages_once() -> None:
    """Patch `tl` and `tl.core` once for a grid, and not for every function that its kernel calls."""
    launch, patch = GridExecutor.__call__, interpreter._patch_lang
    patched: list[Any] = []

    def __call__(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()  # the end of a grid takes its patches away
        launch(self, *args, **kwargs)

    @lru_cache
    def find_languages(function: Any) -> list[Any]:
        return [value for value in function.__globals__.values() if value is tl or value is tl.core]

    def patch_lang(function: Any) -> Any:
        languages = find_languages(function)
        if languages and all(language in patched for language in languages):
            return interpreter._LangPatchScope()
        patched.extend(languages)
        return patch(function)

    GridExecutor.__call__, interpreter._patch_lang = __call__, patch_lang


def _describe_shapes_once() -> None:
    """Let tensors and their types with equal dtypes and shapes share their constant attributes."""
    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    types: dict[Any, dict[str, Any]] = {}
    tensors: dict[Any, dict[str, Any]] = {}

    def type_init(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, getattr(element_ty, "address_space", ""), *shape  # a pointer's name says if it is const
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = vars(self).copy()
        vars(self).update(types[key])

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            make_tensor(self, handle, type)
            tensors[type.name] = {name: getattr(self, name) for name in ("shape", "numel")}
        vars(self).update(tensors[type.name], handle=handle, type=type, dtype=type.scalar)

    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_unless_equal(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        kinds = lhs.type, rhs.type
        if all(kind.is_block() for kind in kinds) and kinds[0].shape.values == kinds[1].shape.values:
            return lhs, rhs
        pair: tuple[Any, Any] = broadcast(self, lhs, rhs)
        return pair

    tl.block_type.__init__, tl.tensor.__init__ = type_init, tensor_init
    TritonSemantic.broadcast_impl_value = broadcast_unless_equal
