"""
Launches of compiled kernels past the Python of Triton's JIT, which binds and describes all arguments for each launch.

A kernel that the JIT has compiled is found by what the JIT looks at: the dtype of a tensor and whether its address is
divisible by 16; those of a tensor descriptor and its block; whether a whole number is 1, is divisible by 16, and takes
32 bits; and the values of everything else.
The first launch of each kind is the JIT's. In the interpreter, and on AMD's GPUs, where the JIT looks at more, all are.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor


def lean(kernel: Any) -> Any:
    """
    Decorator of a kernel, above `triton.jit`: it is launched alike, `kernel[grid](*arguments, **constants)`.

    All arguments are positional but for `constexpr` ones and options of the compiler, which are none.
    """
    return LeanKernel(kernel) if isinstance(kernel, JITFunction) and torch.version.hip is None else kernel


class LeanKernel:
    """A kernel, and what the JIT has made of it for each kind of arguments."""

    __slots__ = ("_compiled", "jit")

    def __init__(self, jit: Any) -> None:
        self.jit = jit
        self._compiled: dict[tuple[Any, ...], tuple[Any, Any, Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        device = driver.active.get_current_device()
        key = (device, *map(kind_of, arguments), *constants, *constants.values())
        found = self._compiled.get(key)
        if found is None:
            self._compile(key, grid, arguments, constants)
            return
        run, function, metadata, rest = found
        across = grid[1] if len(grid) > 1 else 1
        stream = driver.active.get_current_stream(device)
        # The three Nones: metadata and hooks of Triton's profiler.
        run(grid[0], across, 1, stream, function, metadata, None, None, None, *arguments, *rest)

    def _compile(
        self, key: tuple[Any, ...], grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        """Launch by the JIT, and remember what it has launched."""
        parameters = self.jit.params
        if any(parameter.is_constexpr for parameter in parameters[: len(arguments)]):
            raise TypeError(f"{self.jit.fn.__name__} takes constexpr arguments by name alone")
        made = self.jit[grid](*arguments, **constants)
        if hasattr(made, "packed_metadata"):
            rest = tuple(constants.get(each.name, each.default) for each in parameters[len(arguments) :])
            self._compiled[key] = made.run, made.function, made.packed_metadata, rest


def kind_of(argument: Any) -> Any:
    """What the JIT looks at in an argument that is no constant."""
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
