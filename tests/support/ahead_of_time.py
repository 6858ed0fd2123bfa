"""
Triton's kernels compiled for a GPU this machine does not have.

Launches go through Triton's own front, which determines types and divisors of numbers; then they are compiled, and not
run. Run as a program, it compiles all kernels, completely or up to their types, and prints the results as JSON.
"""

import ast
import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

HOPPER = GPUTarget("cuda", 90, 32)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class NoGpu:
    """The part of a driver used by Triton before a launch."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class Compiler:
    """A compiler of launched kernels, each variety once, by the kernel's name."""

    def __init__(self, complete: bool) -> None:
        self.compiled: list[tuple[str, Any]] = []
        driver.set_active(NoGpu())
        run, compile_ = JITFunction.run, JITFunction._do_compile

        def launch(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **settings: Any) -> None:
            # Without a result: a lean launch would ask the driver how to launch it.
            run(kernel, *arguments, grid=grid, warmup=True, **settings)

        def compile_whole(kernel: Any, *arguments: Any) -> Any:
            compiled_kernel = compile_(kernel, *arguments)
            self.compiled.append((kernel.fn.__name__, compiled_kernel))
            return compiled_kernel

        def find_types(
            kernel: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, attrs: Any, _: Any
        ) -> Any:
            source = kernel.ASTSource(kernel, signature, constants, attrs)
            backend, context = make_backend(HOPPER), ir.context()
            ir.load_dialects(context)
            backend.load_dialects(context)
            functions = backend.get_codegen_implementation(options)
            source.make_ir(HOPPER, options, functions, backend.get_module_map(), context)
            self.compiled.append((kernel.fn.__name__, None))
            kernel.device_caches[device][0][key] = source
            return source

        JITFunction.run, JITFunction._do_compile = launch, compile_whole if complete else find_types


def usage(kernel: Any) -> dict[str, int]:
    """Return registers and spilled bytes of a thread, shared bytes of a program, warps, and the instruction count."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        resources = subprocess.check_output([TOOLS / "cuobjdump", "-res-usage", file.name], text=True)
        code = subprocess.check_output([TOOLS / "nvdisasm", "-c", file.name], text=True)
    resources_by_name = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", resources)}
    return {
        "registers": resources_by_name["REG"],
        "spilled": resources_by_name["STACK"] + resources_by_name["LOCAL"],
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "instructions": len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", code, re.M)),
        "wide": len(re.findall(r"\b(?:LDG|STG)\S*\.128|\bLDGSTS\S*\.128|UTMA", code)),
    }


def report() -> dict[str, list[dict[str, Any]]]:
    """Compile all launches completely, and return their resource usage."""
    from support.kernel_launches import launches

    compiler, usages = Compiler(complete=True), {}
    for name, launch in launches():
        launch()
        usages[name] = [{"kernel": kernel, **usage(compiled_kernel)} for kernel, compiled_kernel in compiler.compiled]
        compiler.compiled.clear()
    return usages


def failures() -> dict[str, str]:
    """Return all launches' errors when types are determined, and the kernels without a launch."""
    from support.kernel_launches import launches

    compiler, errors = Compiler(complete=False), {}
    for name, launch in launches():
        try:
            launch()
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    launched = {kernel for kernel, _ in compiler.compiled}
    return errors | {name: "no launch" for name in kernel_names() if name not in launched}


def kernel_names() -> Iterator[str]:
    """Yield all launched kernels' names in the source."""
    for file in (Path(__file__).parents[2] / "kernels").rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and "cache_launches" in map(_decorator_name, node.decorator_list):
                yield node.name


def _decorator_name(decorator: ast.expr) -> str:
    return ast.unparse(decorator).split("(")[0]


def calls() -> dict[str, Callable[[int], object]]:
    """Return launches of operations at any size."""
    from drawloom.kernels.gated_delta import triton as gated_delta
    from drawloom.kernels.gates import triton as gate_kernels
    from drawloom.kernels.grouped_gemm import triton as grouped_gemm
    from drawloom.kernels.moe import triton as moe
    from drawloom.kernels.rms_norm import triton as rms_norm
    from drawloom.kernels.rope import triton as rope

    weight, angles = torch.empty(2048), torch.empty(1, 400, 16)
    return {
        "swiglu of any size": lambda size: gate_kernels._apply_gate(torch.empty(size), torch.empty(size), None, 0),
        "swiglu backward": lambda size: (lambda x: gate_kernels._compute_gradients(x, x, x, None, 0))(
            torch.empty(size, 96)
        ),
        "rms_norm of any rows": lambda size: rms_norm._forward(
            torch.empty(size, 2048), None, weight, 1e-6, False
        ),
        "rope of any length": lambda size: rope._rotate(
            torch.empty(1, size, 4, 32), angles[:, :size], angles[:, :size], False, False
        ),
        "moe_routes": lambda size: moe._compute_routes(torch.zeros(size, 8, dtype=torch.int64), 16),
        "moe_permute": lambda size: moe._copy_tokens_to_rows(
            torch.empty(size, 64), None, torch.empty(size, 8), torch.zeros(size, 8, dtype=torch.int32),
            torch.zeros(16, dtype=torch.int32), 7 * size, False,
        ),
        "gated_delta_rule": lambda size: gated_delta._forward(  # type: ignore[call-arg]
            *(torch.empty(1, size, 2, 64) for _ in "qkv"), *(torch.empty(1, size, 2) for _ in "gb"),
            torch.zeros(1, size, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), None,
        ),
        "causal_conv": lambda size: gated_delta._causal_conv(
            torch.empty(1, size, 64), torch.empty(64, 4), torch.zeros(1, size, dtype=torch.int32), True
        ),
        "grouped_gemm": lambda size: grouped_gemm._multiply_rows_by_expert(
            torch.empty(size, 64), torch.empty(4, 64, 32), torch.zeros(4, dtype=torch.int32)
        ),
    }  # fmt: skip


def varieties() -> dict[str, int]:
    """Count the kernel variants of each operation for a hundred random sizes."""
    compiler, counts, sizes = Compiler(complete=False), {}, random.Random(0)
    for name, call in calls().items():
        for _ in range(100):
            call(sizes.randint(1, 400))
        counts[name] = len(compiler.compiled)
        compiler.compiled.clear()
    return counts


class Launched:
    """A stand-in for a compiled kernel that records its launches."""

    packed_metadata = function = "of no GPU"

    def __init__(self, source: Any) -> None:
        self.source = source
        self.arguments: list[Any] = []

    def run(self, *arguments: Any) -> None:
        self.arguments.append(arguments)


def _identity(argument: Any) -> Any:
    """Return a value, or which tensor or descriptor it is."""
    return id(argument) if isinstance(argument, torch.Tensor | TensorDescriptor) else argument


def lean_launches() -> dict[str, Any]:
    """Return how many launches bypassed the JIT, and the ones that differ from the JIT's own launches."""
    from drawloom.kernels.gates import triton as gate_kernels
    from drawloom.kernels.rms_norm import triton as rms_norm
    from drawloom.kernels.triton.primitives import LeanKernel
    from support.kernel_launches import launches

    Compiler(complete=False)
    launched: dict[int, Launched] = {}
    by_jit, past_jit, compile_ = JITFunction.run, LeanKernel._launch, LeanKernel._launch_by_jit_and_cache
    counts, wrong = {"lean": 0, "by the JIT": 0}, []

    def run(kernel: Any, *arguments: Any, **settings: Any) -> Any:
        source = by_jit(kernel, *arguments, **settings)
        return launched.setdefault(id(source), Launched(source))

    def compiled(self: Any, *arguments: Any) -> None:
        counts["by the JIT"] += 1
        compile_(self, *arguments)

    def launch(self: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
        past_jit(self, grid, *arguments, **constants)
        hits = [launch_record for launch_record in launched.values() if launch_record.arguments]
        if not hits:
            return
        counts["lean"] += 1
        (done,) = hits[0].arguments
        hits[0].arguments.clear()
        own = {name: value for name, value in constants.items() if name in self.jit.signature.parameters}
        bound = self.jit.signature.bind(*arguments, **own)
        bound.apply_defaults()
        expected = [*grid, 1, 1][:3], [*bound.arguments.values()], self.jit[grid](*arguments, **constants)
        same_arguments = [*map(_identity, done[9:])] == [*map(_identity, expected[1])]
        if ([*done[:3]], same_arguments, hits[0]) != (expected[0], True, expected[2]):
            wrong.append(self.jit.fn.__name__)

    JITFunction.run, LeanKernel._launch, LeanKernel._launch_by_jit_and_cache = run, launch, compiled  # type: ignore[method-assign, assignment]
    for _ in range(3):
        for _, launch_record in launches():
            launch_record()
    sizes = random.Random(0)
    for call in calls().values():
        for _ in range(60):
            call(sizes.randint(1, 400))
    for _, first, dtype in product("12", (0, 1), (torch.bfloat16, torch.float32)):
        x = torch.empty(64 * 64 + 8, dtype=dtype)[first : 64 * 64 + first].view(64, 64)
        gate_kernels._apply_gate(x, x, None, 0)
        rms_norm._forward(x, None, x[0], 1e-6, first == 0)
    return {**counts, "wrong": wrong}


if __name__ == "__main__":
    found_out = {"failures": failures, "varieties": varieties, "report": report, "lean": lean_launches}
    for name in sys.argv[1:]:
        print(json.dumps(found_out[name]()))
