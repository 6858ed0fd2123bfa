"""
Launches of compiled kernels without Triton's JIT in Python, which binds and describes all arguments every time.

A compiled kernel is looked up by the JIT's own properties: a tensor's dtype and whether its address is divisible by 16;
a tensor descriptor's dtype and block; whether an integer is 1, is divisible by 16, and fits 32 bits; and all other
arguments' values. The JIT does the first launch of every kind. It does all launches in the interpreter, and on AMD's
GPUs, where it uses more properties.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor


def cache_launches(*varying: str) -> Callable[[Any], Any]:
    """
    Return a decorator for kernels, which are launched as `triton.jit`'s, by `kernel[grid](*arguments, **constants)`.

    A kernel is compiled once for all values of `varying` arguments. `constexpr` arguments and compiler options must be
    passed by name, all other arguments by position.
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
        return partial(self._launch, grid)

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
